"""WCAG 2.1's contrast of two colours, of cells and of decks. Standard library only."""


def ratio(one, other):
  """Contrast of two colours RRGGBB, 1 to 21."""
  light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
  return (light + 0.05) / (dark + 0.05)


def channels(rgb):
  """Red, green and blue of RRGGBB, from 0 to 1."""
  return [int(rgb[i : i + 2], 16) / 255 for i in (0, 2, 4)]


def linear(rgb):
  """The channels of RRGGBB in linear RGB."""
  return [
    c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels(rgb)
  ]


def _luminance(rgb):
  red, green, blue = linear(rgb)
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue
