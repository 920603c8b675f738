"""What all pages look like, and the little script that tells curves' values under the pointer."""

from __future__ import annotations

# Told apart with any kind of colour vision (after Okabe and Ito), and at least three times as dark
# or light as the page.
_LIGHT = ["#0072b2", "#c2410c", "#00805a", "#a4447e", "#8a6a00", "#2a8cbf", "#6b5ca5", "#5f6670"]
_DARK = ["#4fa8dd", "#ff8a4c", "#2fbf94", "#e28cc0", "#e0b93a", "#8ccdf0", "#b1a2ec", "#a3abb5"]
# From the weakest to the strongest.
_RAMP_LIGHT = ["#c9d3dc", "#a9c3d8", "#7fabd0", "#4f8fc2", "#1f6fae", "#083d77"]
_RAMP_DARK = ["#3a444f", "#3f5a73", "#47739a", "#5a92c2", "#82b6e3", "#d3eaff"]


def _variables(ink: str, colours: list[str], ramp: list[str]) -> str:
    numbered = [f"--c{i}:{colour}" for i, colour in enumerate(colours)]
    numbered += [f"--q{i}:{colour}" for i, colour in enumerate(ramp)]
    return ";".join([ink, *numbered])


_INK_LIGHT = "--page:#fff;--card:#f7f8fa;--ink:#1b1f24;--soft:#57606a;--rule:#d8dde3"
_INK_DARK = "--page:#14171b;--card:#1d2127;--ink:#e8eaed;--soft:#a2aab4;--rule:#363c45"

_PER_COLOUR = "".join(
    f".c{i}{{stroke:var(--c{i});fill:var(--c{i})}}.f{i}{{fill:var(--c{i})}}"
    f".b{i}{{background:var(--c{i})}}svg .t{i}{{fill:var(--c{i})}}"
    for i in range(8)
) + "".join(f".q{i}{{stroke:var(--q{i})}}" for i in range(6))

STYLE = (
    f":root{{color-scheme:light dark;{_variables(_INK_LIGHT, _LIGHT, _RAMP_LIGHT)}}}"
    "@media(prefers-color-scheme:dark){:root{"
    f"{_variables(_INK_DARK, _DARK, _RAMP_DARK)}}}}}"
    """
*{box-sizing:border-box}
body{margin:0 auto;padding:1rem;max-width:1240px;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.5rem;line-height:1.25;margin:.2rem 0}
h2{font-size:1.15rem;margin:2rem 0 .5rem;padding-top:.6rem;border-top:1px solid var(--rule)}
p{margin:.3rem 0 .7rem;max-width:75ch}
.sub,.about,figcaption span{color:var(--soft)}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,345px),1fr));gap:.8rem}
figure{margin:0;padding:.7rem;background:var(--card);border-radius:8px;min-width:0}
figure.wide{grid-column:1/-1;margin:.8rem 0}
figcaption{font-weight:600;margin-bottom:.3rem}
figcaption span{display:block;font-weight:400;font-size:.85rem}
.scroll{overflow-x:auto}
.chart{display:block;width:100%;height:auto;max-width:560px}
.chart[data-wide]{min-width:640px;max-width:860px}
.chart text{font:11px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;fill:var(--soft)}
.chart .title{fill:var(--ink)}
.chart .value,.chart .label{fill:var(--ink)}
.chart .label{font-weight:600}
.chart .halo{paint-order:stroke;stroke:var(--card);stroke-width:3px}
.grid line,.chart .grid{stroke:var(--rule);stroke-width:1}
.chart .axis,.chart .tick{stroke:var(--soft);stroke-width:1}
.series path{fill:none;stroke-width:1.7;stroke-linejoin:round;stroke-linecap:round}
.series.dashed path{stroke-dasharray:5 4}
.series .broken{stroke-dasharray:none}
.series circle{stroke:none}
.series .mark{fill:var(--card);stroke:inherit;stroke-width:2}
.chart .note{fill:var(--ink);stroke:none}
.point{fill-opacity:.55;stroke-opacity:.9}
.point.marked{fill-opacity:1;stroke:var(--ink);stroke-width:1.5}
.way{fill:none;stroke-width:1.2;stroke-opacity:.85}
.way:hover{stroke:var(--c1);stroke-width:3}
.way.marked{stroke:var(--c1);stroke-width:2.6;stroke-opacity:1}
.hover line{stroke:var(--soft);stroke-dasharray:2 2}
.legend{display:flex;flex-wrap:wrap;gap:.2rem .9rem;list-style:none;margin:0 0 .4rem;padding:0;
font-size:.85rem}
.legend i{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.35em}
.facts{display:flex;flex-wrap:wrap;gap:.4rem 1.8rem;margin:.6rem 0}
.facts div{min-width:0}
.facts dt{color:var(--soft);font-size:.8rem}
.facts dd{margin:0;font-size:1.1rem;font-weight:600}
table{border-collapse:collapse;font-size:.88rem;font-variant-numeric:tabular-nums;min-width:min(100%,30rem)}
th,td{text-align:left;padding:.25rem .7rem .25rem 0;border-bottom:1px solid var(--rule);
vertical-align:top}
th{color:var(--soft);font-weight:600;white-space:nowrap}
td{overflow-wrap:normal}
.n{text-align:right}
tr.strong td{font-weight:600}
details>summary{cursor:pointer;color:var(--soft)}
.told{font-size:.85rem;min-height:1.5em;color:var(--soft);white-space:pre-wrap}
code,pre{font:.85rem/1.45 ui-monospace,Menlo,Consolas,monospace}
pre{overflow-x:auto;white-space:pre-wrap}
@media print{figure{break-inside:avoid}}
""" + _PER_COLOUR
)

# Shows the values of the drawn points next to the pointer, below the chart.
SCRIPT = """
for (const svg of document.querySelectorAll('svg.lines')) {
  const hover = svg.querySelector('.hover');
  if (!hover) continue;
  const [low, high, left, right] = hover.dataset.x.split(' ').map(Number);
  const told = document.createElement('div');
  told.className = 'told';
  told.setAttribute('aria-hidden', 'true');
  svg.after(told);
  const curves = [...svg.querySelectorAll('.series')].map(g => ({
    name: g.dataset.name,
    x: g.dataset.x.split(' ').map(Number), y: g.dataset.y.split(' ')}));
  const rule = document.createElementNS('http://www.w3.org/2000/svg', 'line');
  const nearest = (values, at) => {
    let begin = 0, end = values.length - 1;
    while (end - begin > 1) {
      const middle = (begin + end) >> 1;
      if (values[middle] < at) begin = middle; else end = middle;
    }
    return at - values[begin] <= values[end] - at ? begin : end;
  };
  svg.addEventListener('pointermove', event => {
    const box = svg.getBoundingClientRect();
    const place = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    const at = low + (place - left) / (right - left) * (high - low);
    let best = null;
    for (const curve of curves) {
      const x = curve.x[nearest(curve.x, at)];
      if (best === null || Math.abs(x - at) < Math.abs(best - at)) best = x;
    }
    const x = left + (best - low) / (high - low) * (right - left);
    rule.setAttribute('x1', x); rule.setAttribute('x2', x);
    rule.setAttribute('y1', hover.dataset.top); rule.setAttribute('y2', hover.dataset.bottom);
    hover.append(rule);
    told.textContent = 'at ' + best + ':  ' + curves.map(curve => {
      const i = nearest(curve.x, best);
      return curve.x[i] === best ? curve.name + ' ' + curve.y[i] : null;
    }).filter(Boolean).join(',  ');
  });
  svg.addEventListener('pointerleave', () => { rule.remove(); told.textContent = ''; });
}
"""
