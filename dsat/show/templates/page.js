"use strict";
// Sorting and filtering of the table of trials.
function key(row, column, kind) {
  const cell = row.cells[column];
  return kind === "number" ? Number(cell.dataset.value) : cell.textContent.trim();
}

function wireTable() {
  const table = document.getElementById("table");
  if (!table) { return; }
  const body = table.tBodies[0];
  const rows = Array.from(body.rows);
  const headings = Array.from(table.tHead.rows[0].cells);

  headings.forEach((heading, column) => {
    const button = heading.querySelector("button");
    button.addEventListener("click", () => {
      const descending = heading.ariaSort === "ascending";
      headings.forEach((other) => { other.ariaSort = "none"; });
      heading.ariaSort = descending ? "descending" : "ascending";
      const kind = button.dataset.kind;
      rows.sort((one, other) => {
        const a = key(one, column, kind), b = key(other, column, kind);
        const order = kind === "number" ? a - b : a.localeCompare(b);
        return descending ? -order : order;
      });
      body.append(...rows);
    });
  });

  const filter = document.getElementById("filter");
  filter.addEventListener("input", () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    rows.forEach((row) => {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      shown += row.hidden ? 0 : 1;
    });
    document.getElementById("count").textContent = `${shown} of ${rows.length}`;
  });
}

// The button that copies the command; hidden where the browser has no clipboard.
function wireCopy() {
  const button = document.getElementById("copy");
  if (!button || !navigator.clipboard) { return; }
  button.hidden = false;
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(document.getElementById("train").textContent);
    button.textContent = "Copied";
  });
}

// Plots, drawn again when the colours of the system change.
let specs = JSON.parse(document.getElementById("specs")?.textContent ?? "[]");
const dark = window.matchMedia("(prefers-color-scheme: dark)");

function draw() {
  const style = getComputedStyle(document.documentElement);
  const text = style.getPropertyValue("--text"), line = style.getPropertyValue("--line");
  const config = {
    background: "transparent",
    font: "system-ui, sans-serif",
    view: { stroke: null },
    axis: { labelColor: text, titleColor: text, gridColor: line, domainColor: line, tickColor: line, labelLimit: 320, labelFontSize: 11 },
    legend: { labelColor: text, titleColor: text, ...(window.innerWidth < 600 && { columns: 1 }) },
    rule: { color: text },
  };
  return Promise.all(specs.map((spec, number) =>
    vegaEmbed(`#plot-${number}`, spec, { config, renderer: "svg", actions: false })));
}

function drawPlots(given) {
  specs = window.vegaEmbed ? given : [];
  return draw();
}

wireTable();
wireCopy();
if (specs.length) {
  draw().then(() => { document.body.dataset.drawn = "yes"; });
}
dark.addEventListener("change", draw);
