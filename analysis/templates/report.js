"use strict";
(() => {
  const { specs, dark } = JSON.parse(document.getElementById("charts").textContent);
  const wanted = matchMedia("(prefers-color-scheme: dark)");
  const recolored = (spec, isDark) => {
    let text = JSON.stringify(spec);
    if (isDark) for (const [light, other] of Object.entries(dark)) text = text.replaceAll(light, other);
    return JSON.parse(text);
  };
  const draw = (isDark) => Object.entries(specs).map(([id, spec]) => {
    const css = getComputedStyle(document.documentElement), color = (name) => css.getPropertyValue(name).trim();
    const ink = color("--ink"), muted = color("--muted"), rule = color("--rule");
    const element = document.getElementById(id), columns = element.clientWidth < 480 ? 1 : 3;
    const config = {
      background: "transparent", font: "system-ui, sans-serif", view: { stroke: rule },
      axis: { labelColor: muted, titleColor: ink, gridColor: rule, domainColor: muted, tickColor: muted, titleFontWeight: "normal", labelFontSize: 12, titleFontSize: 13 },
      legend: { columns, labelFontSize: 13, symbolSize: 90, labelColor: ink, titleColor: ink, symbolStrokeWidth: 2 },
    };
    const options = { renderer: "svg", actions: false, config, tooltip: { theme: isDark ? "dark" : "light" } };
    return vegaEmbed("#" + id, recolored(spec, isDark), options).then(() => { element.dataset.drawn = isDark ? "dark" : "light"; });
  });
  const all = (isDark) => Promise.all(draw(isDark));
  if (Object.keys(specs).length) {
    all(wanted.matches);
    wanted.addEventListener("change", (event) => all(event.matches));
    addEventListener("beforeprint", () => { document.documentElement.classList.add("print"); all(false); });
    addEventListener("afterprint", () => { document.documentElement.classList.remove("print"); all(wanted.matches); });
  }
  const value = (cell) => {
    const text = cell.textContent.trim(), number = parseFloat(text.replaceAll(",", ""));
    return text === "" ? null : Number.isNaN(number) ? text : number;
  };
  const order = (a, b, sign) => {
    if (a === null || b === null) return (a === null) - (b === null); // missing values stay last
    return sign * (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
  };
  for (const button of document.querySelectorAll("th button")) button.addEventListener("click", () => {
    const head = button.closest("th"), body = head.closest("table").tBodies[0];
    const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
    const rows = [...body.rows].map((row) => [value(row.cells[head.cellIndex]), row]);
    rows.sort((one, two) => order(one[0], two[0], sign));
    body.append(...rows.map((entry) => entry[1]));
  });
})();
