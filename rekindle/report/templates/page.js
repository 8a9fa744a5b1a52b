"use strict";
// A copy button for everything marked data-copy, and open details on paper. The page is complete without it.
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
