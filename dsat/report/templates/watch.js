"use strict";
// Status of a run that goes on, and requests to it.
const token = new URLSearchParams(location.search).get("token");
const main = document.getElementById("live");
const statusLine = document.getElementById("status");
const said = document.getElementById("said");
const running = document.querySelector("#running tbody");
const controls = document.getElementById("controls");
let version = null;
let loading = false;

function address(path) {
  return `${location.pathname.replace(/\/$/, "")}/${path}?token=${encodeURIComponent(token)}`;
}

async function load(wanted) {
  if (loading || wanted === version) { return; }
  loading = true;
  try {
    const answer = await fetch(address("state"));
    if (!answer.ok) { throw new Error(`${answer.status}`); }
    const state = await answer.json();
    const words = document.getElementById("filter")?.value ?? "";
    const focused = document.activeElement?.id;
    main.innerHTML = state.html;  // made by a template that escapes whatever is not its own
    wireTable();
    wireCopy();
    const filter = document.getElementById("filter");
    if (filter && words) { filter.value = words; filter.dispatchEvent(new Event("input")); }
    if (focused) { document.getElementById(focused)?.focus(); }
    document.body.dataset.drawn = "no";
    await drawPlots(state.specs);
    document.body.dataset.drawn = "yes";
    document.body.dataset.version = wanted;
    version = wanted;
  } catch (error) {
    said.textContent = `The update could not be fetched: ${error.message}`;
  } finally {
    loading = false;
  }
}

async function ask(request) {
  const answer = await fetch(address("requests"), {
    method: "POST",
    headers: { "Content-Type": "application/json", "Authorization": `Bearer ${token}` },
    body: JSON.stringify(request),
  });
  said.textContent = (await answer.json()).message;
}

function rowOf(trial) {
  const row = document.createElement("tr");
  const name = document.createElement("th");
  name.scope = "row";
  name.textContent = trial.name;
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "cancel";
  button.dataset.trial = trial.id;
  button.setAttribute("aria-label", `cancel ${trial.name}`);
  const cell = document.createElement("td");
  cell.append(button);
  row.append(name, document.createElement("td"), cell);
  return row;
}

function show(now) {
  statusLine.textContent = now.status;
  controls.hidden = !now.goes_on;
  const ids = now.running.map((trial) => trial.id).join();
  if (running.dataset.ids !== ids) {  // else a click would miss a button that is made anew
    running.replaceChildren(...now.running.map(rowOf));
    running.dataset.ids = ids;
  }
  now.running.forEach((trial, number) => {
    running.rows[number].cells[1].textContent = trial.doing;
  });
}

running.addEventListener("click", (event) => {
  const trial = event.target.dataset.trial;
  if (trial !== undefined) { ask({ kind: "cancel", trial_id: Number(trial) }); }
});
document.getElementById("stop").addEventListener("click", () => ask({ kind: "stop" }));
document.getElementById("budget").addEventListener("submit", (event) => {
  event.preventDefault();
  ask({ kind: "budget", max_trials: Number(document.getElementById("most").value) });
});

const events = new EventSource(address("events"));
events.addEventListener("message", (event) => {
  const now = JSON.parse(event.data);
  show(now);
  load(now.version);
});
events.addEventListener("error", () => { statusLine.textContent = "No answer: is dsat still running?"; });
