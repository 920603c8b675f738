"""Reports as one HTML page each, without anything loaded from elsewhere. Pure functions.

- `page.page`: the page, from `page.Section`; in a section, `page.figure` (a title and what is said
  of it around a chart), `page.grid` (figures side by side), `page.facts` (numbers to be seen
  first), `page.table`, `page.paragraph`;
- `charts.line_chart`: curves, of 10^6 points as well: minima and maxima stay to be seen;
- `charts.stacked_rows`, `charts.stacked_columns`: bars, and the parts they consist of.

Charts take plain sequences or NumPy arrays and return `page.Markup`, which is what `page` takes.
Text is escaped wherever it is not `Markup`: names, messages and values go in as they are. Colours
follow the reader's light or dark theme. A chart is 380 units wide, as a phone is, and grows with
its figure.
"""
