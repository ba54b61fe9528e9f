// Shows what the address says, now and whenever it changes.

let opened = null;
const title = document.title;

function show() {
  const at = state.case ? index.cases.findIndex((row) => row.id === state.case) : -1;
  const inCase = state.view === "cases" && at >= 0;
  byId("cases").hidden = state.view !== "cases" || inCase;
  byId("case").hidden = !inCase;
  for (const name of sections.filter((section) => section !== "cases")) byId(`section-${name}`).hidden = state.view !== name;
  for (const link of document.querySelectorAll("header nav a")) {
    link.href = linkTo({ view: link.dataset.view, case: "" });
    if (link.dataset.view === state.view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const before = opened;
  opened = inCase ? at : null;
  document.title = inCase ? `${MARKS[index.cases[at].verdict]} ${index.cases[at].verdict}: ${index.cases[at].id}` : title;
  if (inCase) {
    const heading = showCase(at);
    if (before !== at) {
      heading.focus({ preventScroll: true });
      scrollTo(0, 0);
    }
    return;
  }
  forgetPlots();
  if (state.view !== "cases") return;
  showFirst();
  showFilters();
  showHeat();
  showList();
  if (before !== null) lines[before].link.focus();
}

function restore() {
  state = stateOf(location.hash);
  show();
}

addEventListener("hashchange", restore);
for (const button of document.querySelectorAll("main .command button")) {
  button.addEventListener("click", () => copy(button.previousElementSibling.textContent, button));
}
addEventListener("keydown", (event) => {
  const typing = event.target.closest?.("input, select");
  if (event.key === "Escape" && state.case) change({ case: "" }, { step: true });
  if (event.key === "/" && !typing) {
    event.preventDefault();
    if (byId("cases").hidden) change({ view: "cases", case: "" }, { step: true });
    byId("text").focus();
  }
});

// Paper is white, and what is folded on it stays so.
let folded = [];
addEventListener("beforeprint", () => {
  document.documentElement.dataset.printed = "";
  folded = [...document.querySelectorAll("main details:not([open])")];
  folded.forEach((details) => { details.open = true; });
  redraw();
});
addEventListener("afterprint", () => {
  delete document.documentElement.dataset.printed;
  folded.forEach((details) => { details.open = false; });
  redraw();
});

for (const part of document.querySelectorAll("main > section p, main > section li, .entry")) {
  const texts = [...part.childNodes].filter((node) => node.nodeType === Node.TEXT_NODE && node.data.includes("`"));
  texts.forEach((node) => node.replaceWith(...prose(node.data)));
}
show();
document.documentElement.dataset.ready = "";
