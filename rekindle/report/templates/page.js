"use strict";
// A copy button for everything marked data-copy, open details on paper, and a list of runs that filters and sorts.
// The page is complete without it.
const copyText = async (source, button) => {
  const text = source.textContent;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const range = document.createRange();
    range.selectNodeContents(source);
    getSelection().removeAllRanges();
    getSelection().addRange(range);
    button.textContent = document.execCommand("copy") ? "copied" : "press Ctrl-C";
    return;
  }
  button.textContent = "copied";
};
for (const source of document.querySelectorAll("[data-copy]")) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy";
  button.textContent = "copy";
  button.addEventListener("click", async () => {
    await copyText(source, button);
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  });
  source.after(button);
}
const closed = [];
addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details:not([open])")) {
    details.open = true;
    closed.push(details);
  }
});
addEventListener("afterprint", () => {
  for (const details of closed.splice(0)) details.open = false;
});
const list = document.querySelector("ol.runs");
if (list && list.children.length > 2) {
  const head = list.querySelector(".head");
  const rows = [...list.querySelectorAll("li:not(.head)")];
  const words = new Map(rows.map(row => [row, row.textContent.toLowerCase()]));
  const filter = Object.assign(document.createElement("input"), { type: "search", placeholder: "Filter runs" });
  filter.setAttribute("aria-label", "Filter runs by name, outcome, metric or model");
  const found = document.createElement("small");
  found.setAttribute("role", "status");
  const tools = document.createElement("p");
  tools.className = "filter";
  tools.append(filter, found);
  list.before(tools);
  filter.addEventListener("input", () => {
    const wanted = filter.value.toLowerCase().split(/\s+/);
    for (const row of rows) row.hidden = !wanted.every(word => words.get(row).includes(word));
    const left = rows.filter(row => !row.hidden).length;
    found.textContent = left === rows.length ? "" : `${left} of ${rows.length} runs`;
  });
  // what has no value comes last, whichever way
  const compare = (a, b) => (a === "") - (b === "") || (isNaN(a) || isNaN(b) ? String(a).localeCompare(b, undefined, { numeric: true }) : a - b);
  head.removeAttribute("aria-hidden");
  const buttons = [...head.children].map((label, column) => {
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: label.textContent });
    const value = row => {
      const cell = row.children[column];
      return cell.dataset.sort ?? (cell.querySelector(".none") ? "" : cell.textContent.trim());
    };
    button.addEventListener("click", () => {
      const down = button.dataset.order === "up";
      for (const other of buttons) delete other.dataset.order;
      button.dataset.order = down ? "down" : "up";
      button.setAttribute("aria-label", `${label.textContent}, sorted ${down ? "downwards" : "upwards"}`);
      const order = rows.map(row => [value(row), row]);
      order.sort(([a], [b]) => a === "" || b === "" ? compare(a, b) : down ? compare(b, a) : compare(a, b));
      list.append(...order.map(([, row]) => row));
    });
    label.replaceChildren(button);
    return button;
  });
}
