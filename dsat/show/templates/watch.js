"use strict";
// Fetches the report again when the run has changed.
const main = document.querySelector("main");
const statusLine = document.getElementById("status");
let version = "";

async function show(state) {
  const words = document.getElementById("filter")?.value ?? "";
  const focused = document.activeElement?.id;
  main.innerHTML = state.html;  // made by a template that escapes all text of the run
  wireTable();
  wireCopy();
  const filter = document.getElementById("filter");
  if (filter && words) { filter.value = words; filter.dispatchEvent(new Event("input")); }
  if (focused) { document.getElementById(focused)?.focus(); }
  document.body.dataset.drawn = "no";
  await drawPlots(state.specs);
  document.body.dataset.drawn = "yes";
}

async function refresh() {
  try {
    const answer = await fetch(`state?version=${encodeURIComponent(version)}`);
    if (!answer.ok) { throw new Error(await answer.text()); }
    const state = await answer.json();
    statusLine.textContent = state.status;
    if (state.html !== undefined) { await show(state); }
    version = state.version;
  } catch (error) {
    statusLine.textContent = `No answer: is dsat still running? (${error.message})`;
  }
  setTimeout(refresh, 2000);
}

refresh();
