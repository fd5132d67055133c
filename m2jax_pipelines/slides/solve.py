"""Writes deck.pptx from data.csv by the plan: titles, and which slide says what."""

import csv
import json
import os

from pptx import Presentation
from pptx.chart.data import CategoryChartData
from pptx.enum.chart import XL_CHART_TYPE
from pptx.util import Inches, Pt


def write(rows, titles, path):
  """A deck of three slides: title, summary, chart."""
  names = [row[0] for row in rows]
  values = [float(row[1]) for row in rows]
  deck = Presentation()
  place = Inches(0.5), Inches(1.8), Inches(9), Inches(5)
  for number, title in enumerate(titles):
    slide = deck.slides.add_slide(deck.slide_layouts[5])
    slide.shapes.title.text = title
    for run in slide.shapes.title.text_frame.paragraphs[0].runs:
      run.font.size = Pt(28)
    if number == 1:
      frame = slide.shapes.add_textbox(*place).text_frame
      best = names[values.index(max(values))]
      for text in (f'Total: {sum(values):g}', f'Highest: {best} with {max(values):g}'):
        paragraph = frame.add_paragraph()
        paragraph.text = text
        paragraph.runs[0].font.size = Pt(24)
    if number == 2:
      data = CategoryChartData()
      data.categories = names
      data.add_series('Value', values)
      slide.shapes.add_chart(XL_CHART_TYPE.COLUMN_CLUSTERED, *place, data)
  deck.save(path)


if __name__ == '__main__':
  here = os.path.dirname(os.path.abspath(__file__))
  with open(os.path.join(here, 'plan.json'), encoding='utf-8') as file:
    plan = json.load(file)
  with open('data.csv', encoding='utf-8') as file:
    write(list(csv.reader(file))[1:], plan['titles'], 'deck.pptx')
