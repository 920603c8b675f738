// Shows the values of the drawn points next to the pointer, below the chart.
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
