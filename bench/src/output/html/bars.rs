//! SVG bar charts. Each bar shows the median, and each round is marked.

use std::fmt::Write;

use super::escape::{escape, shortened};
use super::scale::Range;
use crate::output::summary::median;

const WIDTH: f64 = 680.0;
const LEFT: f64 = 270.0;
const RIGHT: f64 = 80.0;
const BAR: f64 = 16.0;
const GAP: f64 = 8.0;
const TOP: f64 = 8.0;

/// Maximum number of characters in a label.
const LABEL: usize = 42;

/// A bar and its label.
pub(super) struct Bar {
    pub(super) label: String,
    /// Index of the color.
    pub(super) colour: usize,
    /// Values of all rounds. The bar is their median.
    pub(super) rounds: Vec<f64>,
}

/// A chart of bars with the same unit. The axis starts at 0.
pub(super) struct Bars {
    pub(super) title: String,
    pub(super) show: fn(f64) -> String,
    pub(super) bars: Vec<Bar>,
}

impl Bars {
    /// Appends the chart to a page.
    pub(super) fn write(&self, page: &mut String) {
        let values = self.bars.iter().flat_map(|bar| bar.rounds.iter().copied());
        let range = Range::from_zero(values);
        let height = TOP + (BAR + GAP) * self.bars.len() as f64;
        let title = escape(&self.title);
        let _ = write!(
            page,
            "<figure><figcaption>{title}</figcaption>\
             <svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"{title}\">"
        );
        for (i, bar) in self.bars.iter().enumerate() {
            let top = TOP + (BAR + GAP) * i as f64;
            self.bar(page, bar, range, top);
        }
        page.push_str("</svg></figure>\n");
    }

    fn bar(&self, page: &mut String, bar: &Bar, range: Range, top: f64) {
        let place = |value| LEFT + range.place(value) * (WIDTH - LEFT - RIGHT);
        let middle = median(&bar.rounds);
        let (low, high) = extremes(&bar.rounds);
        let text = top + BAR / 2.0 + 4.0;
        let _ = write!(
            page,
            "<g><title>{}: {}{}</title>\
             <text x=\"{:.1}\" y=\"{text:.1}\" text-anchor=\"end\">{}</text>\
             <rect class=\"f{}\" x=\"{LEFT}\" y=\"{top:.1}\" width=\"{:.1}\" height=\"{BAR}\"/>",
            escape(&bar.label),
            escape(&(self.show)(middle)),
            self.rounds_of(bar, low, high),
            LEFT - 8.0,
            shortened(&bar.label, LABEL),
            bar.colour,
            place(middle) - LEFT,
        );
        if bar.rounds.len() > 1 {
            let y = top + BAR / 2.0;
            let _ = write!(
                page,
                "<line class=\"range\" x1=\"{:.1}\" x2=\"{:.1}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>",
                place(low),
                place(high)
            );
            for round in &bar.rounds {
                let x = place(*round);
                let _ = write!(
                    page,
                    "<circle class=\"round\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"2.5\"/>"
                );
            }
        }
        let _ = write!(
            page,
            "<text x=\"{:.1}\" y=\"{text:.1}\">{}</text></g>",
            place(high.max(middle)) + 7.0,
            escape(&(self.show)(middle))
        );
    }

    fn rounds_of(&self, bar: &Bar, low: f64, high: f64) -> String {
        match bar.rounds.len() {
            0 | 1 => String::new(),
            n => escape(&format!(
                ", median of {n} rounds from {} to {}",
                (self.show)(low),
                (self.show)(high)
            )),
        }
    }
}

fn extremes(values: &[f64]) -> (f64, f64) {
    let low = values.iter().copied().fold(f64::INFINITY, f64::min);
    let high = values.iter().copied().fold(0.0, f64::max);
    (low.min(high), high)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bar_shows_median_and_rounds() {
        let bars = Bars {
            title: "IOPS".into(),
            show: |value| format!("{value:.0}"),
            bars: vec![Bar {
                label: "<job>".into(),
                colour: 0,
                rounds: vec![80.0, 100.0, 60.0],
            }],
        };
        let mut page = String::new();
        bars.write(&mut page);
        assert_eq!(page.matches("<circle").count(), 3);
        assert!(page.contains("&lt;job&gt;: 80, median of 3 rounds from 60 to 100"));
        // The value is 80, and the axis ends at 100.
        let width = format!("width=\"{:.1}\"", 0.8 * (WIDTH - LEFT - RIGHT));
        assert!(page.contains(&width), "{page}");
    }
}
