// How the page of a graph looks, by day and by night.
#include "serried/graph/text/page.h"

namespace serried::graph {

const std::string_view kPageStyle = R"css(
:root {
  color-scheme: light dark;
  --gutter: 130px;
  --paper: #f6f7f9; --card: #ffffff; --ink: #1c2230; --faint: #6b7385; --line: #e3e6ec; --hover: #eef2fb;
  --mark: #ffe08a; --tick: #f59f00; --accent: #3457d5; --memory: #c9d3ea; --shadow: 0 6px 24px #1c223022;
  --forward: #3b82f6; --backward: #8b5cf6; --collective: #f08c00; --optimizer: #0ca678; --other: #98a1b3;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #12151c; --card: #1a1e28; --ink: #e4e8f1; --faint: #8e97ab; --line: #2a3040; --hover: #232a3a;
    --mark: #5c4a12; --tick: #ffd43b; --accent: #8ea6ff; --memory: #33405f; --shadow: 0 6px 24px #000000aa;
    --forward: #5b9bff; --backward: #a78bfa; --collective: #ffa94d; --optimizer: #38d9a9; --other: #6f7a90;
  }
}
* { box-sizing: border-box; }
html, body { height: 100%; margin: 0; }
body {
  display: flex; flex-direction: column; background: var(--paper); color: var(--ink);
  font: 13px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
.mono, code, pre {
  font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 12px;
}
header {
  padding: 14px 20px 10px; background: var(--card); border-bottom: 1px solid var(--line); position: relative;
  z-index: 2;
}
.head { display: flex; align-items: flex-start; gap: 12px 28px; flex-wrap: wrap; }
h1 { font-size: 17px; line-height: 1.2; margin: 2px 12px 0 0; font-weight: 650; letter-spacing: -.01em; }
.facts { display: flex; flex-wrap: wrap; gap: 6px 28px; margin: 0; flex: 0 1 auto; }
.facts div { min-width: 74px; }
.facts dt { color: var(--faint); font-size: 11px; }
.facts dd { margin: 0; font-size: 16px; font-weight: 600; font-variant-numeric: tabular-nums; white-space: nowrap; }
.facts small { font-size: 11px; font-weight: 400; color: var(--faint); }
.phases { display: flex; flex-wrap: wrap; gap: 6px; margin: 12px 0 10px; }
.phases label {
  display: inline-flex; align-items: center; gap: 7px; padding: 3px 10px 3px 8px; border: 1px solid var(--line);
  border-radius: 99px; cursor: pointer; user-select: none; white-space: nowrap;
}
.phases label:hover { background: var(--hover); }
.phases input {
  appearance: none; width: 11px; height: 11px; margin: 0; border-radius: 3px; border: 2px solid var(--hue);
  cursor: pointer;
}
.phases input:checked { background: var(--hue); }
.phases label:has(input:not(:checked)) { color: var(--faint); }
.phases b { font-weight: 600; }
.phases small { color: var(--faint); font-size: 12px; font-variant-numeric: tabular-nums; }
.search { display: flex; align-items: center; gap: 4px; flex: 1 1 340px; max-width: 560px; margin-left: auto; }
.search input {
  flex: 1; min-width: 0; font: inherit; color: inherit; background: var(--paper); border: 1px solid var(--line);
  border-radius: 7px; padding: 5px 10px;
}
.search output {
  min-width: 66px; text-align: center; color: var(--faint); font-variant-numeric: tabular-nums; white-space: nowrap;
}
button, summary {
  font: inherit; color: inherit; background: var(--paper); border: 1px solid var(--line); border-radius: 7px;
  padding: 4px 10px; cursor: pointer;
}
button:hover:enabled, summary:hover { background: var(--hover); }
button:disabled { opacity: .45; cursor: default; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 1px; }
.report { position: relative; margin-left: 8px; }
.report summary { list-style: none; user-select: none; }
.report pre {
  position: absolute; right: 0; top: 34px; margin: 0; padding: 16px 20px; max-height: 70vh;
  max-width: calc(100vw - 40px); overflow: auto;
  background: var(--card); border: 1px solid var(--line); border-radius: 10px; box-shadow: var(--shadow);
}
[hidden] { display: none !important; }
#strip { display: block; width: 100%; height: 84px; cursor: crosshair; touch-action: none; }
main { flex: 1; min-height: 0; display: flex; }
.ops { flex: 1; min-width: 0; display: flex; flex-direction: column; }
.names {
  flex: none; overflow: hidden; scrollbar-gutter: stable; margin-left: var(--gutter); color: var(--faint);
  font-size: 11px; border-bottom: 1px solid var(--line);
}
#list {
  flex: 1; min-height: 0; overflow: auto scroll; position: relative; background: var(--card); outline-offset: -2px;
}
#space { position: relative; min-width: 560px; }
#links {
  position: sticky; top: 0; left: 0; display: block; width: var(--gutter); height: 0; z-index: 1;
  pointer-events: none;
}
#rows { position: absolute; left: var(--gutter); right: 0; top: 0; }
.row {
  height: 26px; display: grid; grid-template-columns: 4px 52px minmax(110px, 5fr) minmax(0, 8fr) 76px minmax(0, 5fr);
  align-items: center;
  gap: 0 10px; padding-right: 16px; cursor: default; white-space: nowrap;
}
.row > * { overflow: hidden; text-overflow: ellipsis; }
.row i { height: 26px; background: var(--hue); }
.row .no { color: var(--faint); text-align: right; font-size: 11px; font-variant-numeric: tabular-nums; }
.row .op { font-weight: 600; }
.row .what { color: var(--faint); }
.row .bytes { text-align: right; font-variant-numeric: tabular-nums; }
.row .given {
  justify-self: start; max-width: 100%; border-radius: 99px; padding: 0 9px; color: var(--ink);
  background: color-mix(in srgb, var(--collective) 22%, transparent);
}
.row .given:empty { display: none; }
.row[data-op]:hover { background: var(--hover); }
.row.hit { background: color-mix(in srgb, var(--mark) 45%, transparent); }
.row.now { background: var(--mark); }
.row.chosen {
  background: color-mix(in srgb, var(--accent) 16%, transparent); box-shadow: inset 0 0 0 1px var(--accent);
}
.empty { padding: 60px 20px; text-align: center; color: var(--faint); }
aside { width: 360px; flex: none; overflow: auto; border-left: 1px solid var(--line); padding: 16px 18px; }
aside h2 { font-size: 15px; margin: 0 0 6px; overflow-wrap: anywhere; }
aside h3 { font-size: 11px; color: var(--faint); font-weight: 600; margin: 18px 0 4px; }
aside p { margin: 6px 0; color: var(--faint); }
aside code {
  display: block; white-space: pre-wrap; overflow-wrap: anywhere; max-height: 200px; overflow: auto;
  background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 8px 10px;
}
aside ul { list-style: none; margin: 0; padding: 0; }
aside li { padding: 5px 0; border-top: 1px solid var(--line); overflow-wrap: anywhere; }
aside li:first-child { border-top: 0; }
aside li .size { float: right; margin-left: 8px; font-variant-numeric: tabular-nums; }
aside li .where { color: var(--faint); }
aside kbd {
  font: inherit; border: 1px solid var(--line); border-bottom-width: 2px; border-radius: 5px; padding: 0 6px;
  background: var(--card);
}
.badge {
  display: inline-block; border-radius: 99px; padding: 0 9px; font-size: 12px;
  background: color-mix(in srgb, var(--hue) 22%, transparent);
}
.link, .link:hover:enabled { color: var(--accent); background: none; border: 0; padding: 0; font-weight: inherit; }
.link:not(.mono) { font-size: inherit; }
.link:hover { text-decoration: underline; }
noscript { padding: 20px; overflow: auto; }
@media (max-width: 1200px) {
  :root { --gutter: 96px; }
  aside { width: 280px; }
  .facts { gap: 6px 20px; }
}
@media (max-width: 900px) {
  :root { --gutter: 64px; }
  header { padding: 10px 12px 8px; }
  .facts { gap: 4px 18px; }
  main { flex-direction: column; }
  .phases { flex-wrap: nowrap; overflow-x: auto; scrollbar-width: none; margin: 8px 0; }
  .facts div { min-width: 0; }
  .facts dd { font-size: 14px; }
  #strip { height: 60px; }
  aside { width: auto; max-height: 30vh; border-left: 0; border-top: 1px solid var(--line); padding: 10px 12px; }
  .ops { min-height: 0; }
  #space { min-width: 0; }
  .row { grid-template-columns: 4px 40px minmax(0, 1fr) 72px minmax(0, 130px); gap: 0 8px; padding-right: 8px; }
  .row .what { display: none; }
}
)css";

}  // namespace serried::graph
