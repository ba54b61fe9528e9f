// One case: what is wrong, how to run it again, its curves, and everything that it was judged by.

const bytes = (count) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = count > 0 ? Math.min(Math.floor(Math.log2(count) / 10), units.length - 1) : 0;
  return power ? `${(count / 1024 ** power).toPrecision(4)} ${units[power]}` : `${count} B`;
};
const part = (title, ...children) => (children.some(Boolean) ? el("section", {}, el("h3", {}, title), ...children) : null);
const facts = (pairs) => (pairs.length ? el("dl", { class: "facts" }, ...pairs.map(
  ([name, value, title = ""]) => el("div", { title }, el("dt", {}, name), el("dd", {}, ...prose(value))),
)) : null);
const plain = (columns, rows) => (rows.length ? el("div", { class: "scroll" }, el(
  "table", { class: "plain" },
  el("thead", {}, el("tr", {}, ...columns.map((name) => el("th", { scope: "col" }, name)))),
  el("tbody", {}, ...rows.map(({ cells, name = "" }) => el("tr", { class: name }, ...cells.map((cell) => el("td", {}, ...prose(cell)))))),
)) : null);

async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "copied";
  } catch {
    getSelection().selectAllChildren(button.previousElementSibling);
    button.textContent = document.execCommand("copy") ? "copied" : "selected";
  }
  setTimeout(() => { button.textContent = "copy"; }, 2000);
}

const command = (text) => (text ? el(
  "p", { class: "command" }, el("code", {}, text),
  el("button", { type: "button", onclick: (event) => copy(text, event.target) }, "copy"),
) : null);

// A rule leads to what its check asks, below.
function rule(name) {
  const [check] = name.split("/");
  const show = (event) => {
    event.preventDefault();
    byId(`check-${check}`)?.scrollIntoView();
  };
  return index.checks[check] ? el("a", { href: `#check-${check}`, onclick: show }, name) : name;
}

function finding(record) {
  const [message, ...more] = record.message.split("\n");
  const rows = [["expected", record.expected], ["found", record.found], ["fix", record.fix]].filter(([, value]) => value);
  return el(
    "li", { class: record.effect ? "effect" : "cause" },
    el("p", {}, el("strong", {}, rule(record.rule)), record.place ? ` [${record.place}]` : "", ": ", ...prose(message),
      record.effect ? el("span", { class: "tag" }, "likely an effect") : null),
    more.length ? el("pre", {}, more.join("\n")) : null,
    facts(rows),
  );
}

// What is near to the cause; what likely follows from it is folded, where anything is before it.
function findings(found) {
  const causes = found.filter((record) => !record.effect);
  const effects = causes.length ? found.filter((record) => record.effect) : [];
  const list = (records, start) => el("ol", { class: "findings", start: `${start}` }, ...records.map(finding));
  return [
    found.length ? list(causes.length ? causes : found, 1) : null,
    effects.length ? el("details", {}, el("summary", {}, `${effects.length} that likely follow`), list(effects, causes.length + 1)) : null,
  ];
}

// What is wrong, why we say so, and what to do: the last as a command where it is one.
function wrong(detail) {
  return (detail.lines || []).map((line, at) => {
    if (line.startsWith("next: ")) return command(line.slice(6));
    return el("p", {}, ...(at ? prose(line) : [el("strong", {}, ...prose(line))]));
  });
}

function wire(rows) {
  return plain(["of all ranks and steps", "found", "formula", ""], (rows || []).map(
    ([name, found, formula, differs]) => ({ name: differs ? "differs" : "", cells: [name, found, formula, differs ? "differs" : ""] }),
  ));
}

function listing(table) {
  if (!table) return null;
  const at = table.verdict;
  return plain(table.columns, table.rows.map((cells) => ({ cells, name: at === undefined ? "" : `v-${cells[at]}` })));
}

const precise = (value) => (value === undefined ? "–" : Number.isFinite(number(value)) ? number(value).toPrecision(7) : `${value}`);

function numbersOfSteps(detail) {
  const named = Object.entries(detail.curves || {});
  const columns = named.flatMap(([name]) => [`loss, ${TOLD[name]}`, `gradient norm, ${TOLD[name]}`]);
  const steps = Math.max(0, ...named.map(([, curve]) => curve.losses.length));
  const rows = Array.from({ length: steps }, (_, step) => ({
    cells: [`${step + 1}`, ...named.flatMap(([, curve]) => [precise(curve.losses[step]), precise(curve.grad_norms[step])])],
  }));
  return steps ? el("details", {}, el("summary", {}, "numbers of every step"), plain(["step", ...columns], rows)) : null;
}

function judged(detail) {
  const skipped = (detail.unjudged || []).map((skip) => ({ cells: [skip.check, skip.reason], name: skip.unverified ? "unverified" : "" }));
  const shown = [...(detail.findings || []), ...(detail.fixed || [])].map((broken) => broken.rule.split("/")[0]);
  const asked = [...new Set(shown)].filter((name) => index.checks[name]);
  return [
    ...asked.map((name) => el("p", { id: `check-${name}` }, el("strong", {}, name), ": ", ...prose(index.checks[name].join(" ")))),
    detail.checks?.length ? el("p", {}, `checked: ${detail.checks.join(", ")}`) : null,
    skipped.length ? plain(["not checked", "why"], skipped) : null,
  ];
}

function steppers(row) {
  const shown = sorted(lines).filter((line) => selected(line.row)).map((line) => line.row.id);
  const at = shown.indexOf(row.id);
  const link = (id, text) => (id === undefined ? el("span", { class: "off" }, text) : el("a", { href: linkTo({ case: id }) }, text));
  return el("nav", { class: "steppers", "aria-label": "cases" },
    el("a", { href: linkTo({ case: "" }), class: "back" }, "← all cases"),
    link(at > 0 ? shown[at - 1] : undefined, "previous"), link(at >= 0 ? shown[at + 1] : undefined, "next"));
}

// Where what to do next is not this very command.
const again = (detail) => !(detail.lines || []).some((line) => line.startsWith(`next: ${detail.command}`));

function showCase(at) {
  forgetPlots();
  const row = index.cases[at];
  const detail = JSON.parse(byId(`detail-${at}`).textContent);
  const made = curvesOf(detail);
  const title = el("h2", { tabindex: "-1" }, badge(row.verdict), " ", el("span", { class: "id" }, row.id));
  fill(
    byId("case"),
    steppers(row),
    title,
    el("p", {}, detail.outcome, "."),
    ...[
      facts([...(detail.facts || []), ...(detail.axes || []).map(([name, value]) => [name, value, index.meanings[name]])]),
      part("What is wrong", ...wrong(detail)),
      again(detail) ? part("Run it again", command(detail.command)) : null,
      part("Stacks", ...(detail.stacks || []).map((stack) => (stack.text
        ? el("details", { class: "stack", open: true }, el("summary", {}, stack.head), el("pre", {}, stack.text)) : el("p", {}, stack.head)))),
      part("Findings", ...findings(detail.findings || []), (detail.findings || []).length
        ? el("p", {}, el("code", {}, "fp8-harness explain RULE"), " has the meaning of a rule, its usual causes and what to do.") : null),
      part("Findings with the candidate fix", ...findings(detail.fixed || [])),
      part("Error by module", errors(detail)),
      part("Curves", made.length ? el("div", { class: "curves" }, ...made.map((plot) => plot.figure)) : null, numbersOfSteps(detail)),
      part("Largest distances", facts(detail.numbers || [])),
      part("Scales of casts to float8", scales(detail.casts || [])),
      part("Values that casts lose", underflow(detail.casts || [])),
      part("Communicated and saved bytes", wire(detail.wire)),
      part("Collectives in time", timeline(detail.timeline)),
      part("Fused operators", plain(["operator", "executions of all ranks and steps"], Object.entries(detail.fused || {}).map(([name, count]) => ({ cells: [name, `${count}`] })))),
      part("Checks", ...judged(detail)),
      part("History", detail.history ? el("div", { class: "history" }, listing(detail.history)) : null),
    ].filter(Boolean),
  );
  made.forEach((plot) => plot.draw());
  return title;
}
