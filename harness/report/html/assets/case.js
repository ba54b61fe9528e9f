// One case: what is wrong, how to run it again, its curves, and everything that it was judged by.

const bytes = (count) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = count > 0 ? Math.min(Math.floor(Math.log2(count) / 10), units.length - 1) : 0;
  return power ? `${(count / 1024 ** power).toPrecision(4)} ${units[power]}` : `${count} B`;
};
const part = (title, ...children) => (children.some(Boolean) ? el("section", {}, el("h3", {}, title), ...children) : null);
const facts = (pairs) => (pairs.length ? el("dl", { class: "facts" }, ...pairs.map(
  ([name, value, title = ""]) => el("div", { title }, el("dt", {}, name), el("dd", {}, value)),
)) : null);
const plain = (columns, rows) => (rows.length ? el("div", { class: "scroll" }, el(
  "table", { class: "plain" },
  el("thead", {}, el("tr", {}, ...columns.map((name) => el("th", { scope: "col" }, name)))),
  el("tbody", {}, ...rows.map(({ cells, name = "" }) => el("tr", { class: name }, ...cells.map((cell) => el("td", {}, cell))))),
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
    el("p", {}, el("strong", {}, rule(record.rule)), record.place ? ` [${record.place}]` : "", ": ", message,
      record.effect ? el("span", { class: "tag" }, "likely an effect") : null),
    more.length ? el("pre", {}, more.join("\n")) : null,
    facts(rows),
  );
}

const findings = (found) => (found.length ? el("ol", { class: "findings" }, ...found.map(finding)) : null);

const SHARES = { flushed: "flushed to zero", saturated: "saturated", amax: "largest magnitude", scale: "scale" };

function castCell(row, kind, step) {
  if (kind === "scale") {
    const [low, high] = [row.low[step], (row.high || row.low)[step]];
    return el("td", { class: "digits" }, low === high ? short(low) : `${short(low)} to ${short(high)}`);
  }
  const value = kind === "amax" ? row.amax[step] : (row[kind] || [])[step] ?? (row.amax[step] === null ? null : 0);
  if (kind === "amax") return el("td", { class: "digits" }, short(value));
  const share = number(value);
  const level = value === null ? "none" : !Number.isFinite(share) || share > 0.1 ? 4 : share > 0.01 ? 3 : share > 1e-3 ? 2 : share > 0 ? 1 : 0;
  const text = value === null ? "–" : !Number.isFinite(share) ? "NaN" : share === 0 ? "0" : `${short(share * 100)} %`;
  return el("td", { class: `digits heat-${level}` }, text);
}

const MOST_ROWS = 12;

function casts(rows) {
  if (!rows.length) return null;
  const place = el("div", { class: "scroll" });
  const steps = rows[0].amax.map((_, step) => step);
  const lost = (row, share) => Math.max(...(row[share] || [0]).map((value) => (
    value === null ? 0 : Number.isFinite(number(value)) ? number(value) : Infinity)));
  const most = (share) => Math.max(...rows.map((row) => lost(row, share)));
  let [kind, all] = [most("saturated") > most("flushed") ? "saturated" : "flushed", rows.length <= MOST_ROWS];
  const more = el("button", { type: "button", onclick: () => { all = true; draw(); } }, `show all ${rows.length}`);
  const draw = () => {
    const order = kind === "amax" || kind === "scale" ? rows : [...rows].sort((one, other) => lost(other, kind) - lost(one, kind));
    fill(place, el(
      "table", { class: "plain casts" }, el("caption", {}, SHARES[kind]),
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "linear"), el("th", { scope: "col" }, "operand"),
        ...steps.map((step) => el("th", { scope: "col" }, `step ${step + 1}`)))),
      el("tbody", {}, ...order.slice(0, all ? order.length : MOST_ROWS).map((row) => el(
        "tr", {}, el("th", { scope: "row" }, row.fqn), el("td", {}, row.role), ...steps.map((step) => castCell(row, kind, step)),
      ))),
    ));
    more.hidden = all;
  };
  const choose = el("select", { onchange: (event) => { kind = event.target.value; draw(); } },
    ...Object.entries(SHARES).map(([value, text]) => el("option", { value, selected: value === kind }, text)));
  draw();
  return el("div", {}, el("p", { class: "fields" }, el("label", {}, "show ", choose), " of every layer and step, the worst first"), place, more);
}

function wire(detail) {
  const rows = (detail.wire || []).map(([name, found, expected]) => {
    const same = found && expected && found.calls === expected.calls && found.payload_bytes === expected.payload_bytes;
    const sentText = (sent) => (sent ? `${sent.calls} calls, ${bytes(sent.payload_bytes)}` : "none");
    return { name: !expected ? "" : same ? "" : "differs", cells: [name, sentText(found), expected ? sentText(expected) : "only limits, or no formula", !expected ? "" : same ? "equal" : "differs"] };
  });
  const [saved, formula] = detail.saved || [null, null];
  if (saved !== null) {
    const same = saved === formula;
    rows.push({
      name: formula === null || same ? "" : "differs",
      cells: ["saved for backward", bytes(saved), formula === null ? "only limits, or no formula" : bytes(formula), formula === null ? "" : same ? "equal" : "differs"],
    });
  }
  return plain(["of all ranks and steps", "found", "by the formula", ""], rows);
}

function listing(table) {
  if (!table) return null;
  const at = table.verdict;
  return plain(table.columns, table.rows.map((cells) => ({ cells, name: at === undefined ? "" : `v-${cells[at]}` })));
}

const precise = (value) => (value === undefined ? "–" : Number.isFinite(number(value)) ? number(value).toPrecision(7) : `${value}`);

function numbersOfSteps(detail) {
  const named = Object.entries(detail.curves || {});
  const columns = named.flatMap(([name]) => [`loss, ${name}`, `gradient norm, ${name}`]);
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
    ...asked.map((name) => el("p", { id: `check-${name}` }, el("strong", {}, name), `: ${index.checks[name].join(" ")}`)),
    detail.checks?.length ? el("p", {}, `judged by ${detail.checks.join(", ")}`) : null,
    skipped.length ? plain(["not judged", "why"], skipped) : null,
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
      part("What is wrong", ...(detail.lines || []).map((line, number) => el("p", {}, number ? line : el("strong", {}, line)))),
      part("Run it again", command(detail.command)),
      part("Findings", findings(detail.findings || []), (detail.findings || []).length
        ? el("p", {}, el("code", {}, "fp8-harness explain RULE"), " has the meaning of a rule, its usual causes and what to do.") : null, detail.signature ? el("p", { class: "signature" }, "signature: ", el("code", {}, detail.signature)) : null),
      part("Findings with the candidate fix", findings(detail.fixed || [])),
      part("Stacks", ...(detail.stacks || []).map((stack) => (stack.text
        ? el("details", { class: "stack", open: true }, el("summary", {}, stack.head), el("pre", {}, stack.text)) : el("p", {}, stack.head)))),
      part("Curves", made.length ? el("div", { class: "curves" }, ...made.map((plot) => plot.figure)) : null, numbersOfSteps(detail)),
      part("Largest distances", facts(detail.numbers || [])),
      part("Casts to float8", casts(detail.casts || [])),
      part("Wire and saved bytes", wire(detail)),
      part("Fused operators", plain(["operator", "executions of all ranks and steps"], Object.entries(detail.fused || {}).map(([name, count]) => ({ cells: [name, `${count}`] })))),
      part("Checks", ...judged(detail)),
      part("History", detail.history ? el("div", { class: "history" }, listing(detail.history)) : null),
    ].filter(Boolean),
  );
  made.forEach((plot) => plot.draw());
  return title;
}
