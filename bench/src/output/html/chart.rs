//! SVG line charts.

use std::fmt::Write;

use super::escape::{escape, shortened};
use super::scale::Range;

/// Width of a chart in SVG units.
const WIDTH: f64 = 680.0;
const HEIGHT: f64 = 250.0;
const LEFT: f64 = 66.0;
const TOP: f64 = 26.0;
const BOTTOM: f64 = 44.0;

/// Minimum distance between labels at the ends of lines.
const LINE_HEIGHT: f64 = 15.0;

/// Maximum number of characters in a label.
const LABEL: usize = 30;

/// Number of colors in the stylesheet. After this, lines are dashed.
pub(super) const COLOURS: usize = 6;

/// A line and its label.
pub(super) struct Series {
    /// Label at the end of the line.
    pub(super) label: String,
    /// Index of the color.
    pub(super) colour: usize,
    /// Set for a dashed line.
    pub(super) dashed: bool,
    /// Points, with an optional text which is shown as a tooltip.
    pub(super) points: Vec<(f64, f64, String)>,
    /// Sorted indices of points that are not connected to the previous point.
    pub(super) gaps: Vec<usize>,
}

/// An axis with ticks.
pub(super) struct Axis {
    pub(super) label: &'static str,
    pub(super) range: Range,
    /// Position and text for each tick.
    pub(super) ticks: Vec<(f64, String)>,
}

impl Axis {
    /// Creates an axis with the default ticks for its range.
    pub(super) fn new(label: &'static str, range: Range, show: fn(f64) -> String) -> Self {
        let ticks = range.ticks().into_iter();
        Self {
            label,
            range,
            ticks: ticks.map(|value| (value, round(&show(value)))).collect(),
        }
    }
}

/// Removes trailing zeros. As ticks are at round values, use `5 ms` instead of `5.00 ms`.
fn round(shown: &str) -> String {
    let digit = |c: char| c.is_ascii_digit() || c == '.' || c == '-';
    let end = shown.find(|c| !digit(c)).unwrap_or(shown.len());
    let (number, unit) = shown.split_at(end);
    match number.contains('.') {
        true => format!(
            "{}{unit}",
            number.trim_end_matches('0').trim_end_matches('.')
        ),
        false => shown.to_owned(),
    }
}

/// A line chart.
pub(super) struct Chart {
    pub(super) title: String,
    pub(super) x: Axis,
    pub(super) y: Axis,
    pub(super) series: Vec<Series>,
    /// Set to mark each point and to show its tooltip.
    pub(super) marks: bool,
}

impl Chart {
    /// Appends the chart to a page.
    pub(super) fn write(&self, page: &mut String) {
        let longest = self.series.iter().map(|s| s.label.chars().count()).max();
        let labels = longest.unwrap_or(0).min(LABEL + 1) as f64;
        let area = Area {
            right: WIDTH - 16.0 - 6.6 * labels,
        };
        let title = escape(&self.title);
        let names: Vec<_> = self.series.iter().map(|s| s.label.as_str()).collect();
        let about = escape(&format!(
            "{}: {} by {}; lines: {}",
            self.title,
            self.y.label,
            self.x.label,
            names.join(", ")
        ));
        let _ = write!(
            page,
            "<figure><figcaption>{title}</figcaption>\
             <svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{about}\">"
        );
        self.axes(page, &area);
        for series in &self.series {
            self.line(page, &area, series);
        }
        self.labels(page, &area);
        page.push_str("</svg></figure>\n");
    }

    fn axes(&self, page: &mut String, area: &Area) {
        let (bottom, right) = (HEIGHT - BOTTOM, area.right);
        for (value, text) in &self.y.ticks {
            let y = area.y(self.y.range.place(*value));
            let _ = write!(
                page,
                "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{right:.1}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>\
                 <text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                LEFT - 7.0,
                y + 4.0,
                escape(text)
            );
        }
        for (value, text) in &self.x.ticks {
            let x = area.x(self.x.range.place(*value));
            let _ = write!(
                page,
                "<line class=\"axis\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{bottom}\" y2=\"{:.1}\"/>\
                 <text class=\"tick\" x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
                bottom + 5.0,
                bottom + 18.0,
                escape(text)
            );
        }
        let _ = write!(
            page,
            "<line class=\"axis\" x1=\"{LEFT}\" x2=\"{right:.1}\" y1=\"{bottom}\" y2=\"{bottom}\"/>\
             <text class=\"tick\" x=\"0\" y=\"12\">{}</text>\
             <text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            escape(self.y.label),
            f64::midpoint(LEFT, right),
            HEIGHT - 6.0,
            escape(self.x.label)
        );
    }

    fn line(&self, page: &mut String, area: &Area, series: &Series) {
        let colour = series.colour % COLOURS;
        let dashed = if series.dashed { " d" } else { "" };
        let place = |(x, y, _): &(f64, f64, String)| {
            let (x, y) = (self.x.range.place(*x), self.y.range.place(*y));
            (area.x(x), area.y(y))
        };
        let mut start = 0;
        for end in series.gaps.iter().copied().chain([series.points.len()]) {
            let part = &series.points[start..end];
            // If there are gaps on both sides, draw a dot by connecting the point to itself.
            let again = part.first().filter(|_| part.len() == 1);
            let _ = write!(page, "<polyline class=\"l s{colour}{dashed}\" points=\"");
            for point in part.iter().chain(again) {
                let (x, y) = place(point);
                let _ = write!(page, "{x:.1},{y:.1} ");
            }
            page.push_str("\"/>");
            start = end;
        }
        for point in series.points.iter().filter(|_| self.marks) {
            let ((x, y), about) = (place(point), escape(&point.2));
            let _ = write!(
                page,
                "<circle class=\"f{colour}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\"/>\
                 <circle class=\"hit\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"9\"><title>{about}</title></circle>"
            );
        }
    }

    /// Adds a label near the end of each line. Labels are moved if they would overlap.
    fn labels(&self, page: &mut String, area: &Area) {
        let mut ends: Vec<(f64, f64, &Series)> = Vec::new();
        for series in &self.series {
            if let Some((x, y, _)) = series.points.last() {
                let (x, y) = (self.x.range.place(*x), self.y.range.place(*y));
                ends.push((area.x(x), area.y(y), series));
            }
        }
        ends.sort_by(|a, b| a.1.total_cmp(&b.1));
        let wanted: Vec<_> = ends.iter().map(|(_, y, _)| *y).collect();
        let places = spread(&wanted, TOP, HEIGHT - BOTTOM);
        for ((x, y, series), place) in ends.iter().zip(places) {
            let at = area.right + 10.0;
            if (y - place).abs() > 3.0 || at - x > 14.0 {
                let _ = write!(
                    page,
                    "<line class=\"lead\" x1=\"{:.1}\" y1=\"{y:.1}\" x2=\"{:.1}\" y2=\"{place:.1}\"/>",
                    x + 4.0,
                    at - 2.0
                );
            }
            let _ = write!(
                page,
                "<text class=\"f{}\" x=\"{at:.1}\" y=\"{:.1}\">{}</text>",
                series.colour % COLOURS,
                place + 4.0,
                shortened(&series.label, LABEL)
            );
        }
    }
}

/// The part of the chart used for the lines.
struct Area {
    right: f64,
}

impl Area {
    fn x(&self, place: f64) -> f64 {
        LEFT + place * (self.right - LEFT)
    }

    fn y(&self, place: f64) -> f64 {
        HEIGHT - BOTTOM - place * (HEIGHT - BOTTOM - TOP)
    }
}

/// Returns the positions of labels. These are close to the requested positions and in the same
/// order, with a distance of one line if there is enough space.
fn spread(wanted: &[f64], top: f64, bottom: f64) -> Vec<f64> {
    let room = (bottom - top) / wanted.len().max(1) as f64;
    let apart = LINE_HEIGHT.min(room);
    let mut places = wanted.to_vec();
    for i in 1..places.len() {
        places[i] = places[i].max(places[i - 1] + apart);
    }
    // Move labels up if they are below the bottom, including previous labels if they would overlap.
    let mut limit = bottom;
    for place in places.iter_mut().rev() {
        *place = place.min(limit);
        limit = *place - apart;
    }
    places
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tick_labels_are_round() {
        assert_eq!(round("5.00 ms"), "5 ms");
        assert_eq!(round("2.50k"), "2.5k");
        assert_eq!(round("100 us"), "100 us");
        assert_eq!(round("0"), "0");
    }

    #[test]
    fn labels_do_not_overlap() {
        let places = spread(&[100.0, 101.0, 102.0, 198.0, 199.0], 20.0, 200.0);
        for pair in places.windows(2) {
            assert!(pair[1] - pair[0] >= LINE_HEIGHT - 1e-9, "{places:?}");
        }
        assert_eq!(places[0], 100.0);
        assert!(places[4] <= 200.0);
        let crowded = spread(&[100.0; 40], 20.0, 200.0);
        assert!(
            crowded[0] >= 20.0 - 1e-9 && crowded[39] <= 200.0,
            "{crowded:?}"
        );
    }
}
