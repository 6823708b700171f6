//! Draws curves as SVG charts.

use plotters::prelude::*;

use super::curves::{Curve, Vary};
use super::results::Scaling;
use super::stats::Summary;
use super::systems::{self, System};
use crate::Failure;

const SIZE: (u32, u32) = (760, 420);

/// Colors that can be distinguished by color-blind readers (Okabe and Ito). Each system uses the
/// same color in all charts.
const COLOURS: [(&str, RGBColor); 4] = [
    (systems::NBDKIT, RGBColor(0, 114, 178)),
    (systems::SRP, RGBColor(213, 94, 0)),
    (systems::ISER, RGBColor(0, 158, 115)),
    (systems::ISCSI, RGBColor(204, 121, 167)),
];

/// A line: index of the point on the axis, and the median of all rounds.
type Line = (&'static System, Vec<(usize, f64)>);

/// Draws a curve. Returns `None` if it was not measured.
pub(super) fn draw(curve: &Curve, scaling: &Scaling) -> Result<Option<String>, Failure> {
    let lines = lines(curve, scaling);
    let values = lines.iter().flat_map(|(_, line)| line).map(|(_, y)| *y);
    let values: Vec<f64> = values.filter(|y| *y > 0.0).collect();
    let Some(range) = Summary::of(&values) else {
        return Ok(None);
    };
    let mut svg = String::new();
    draw_lines(curve, &lines, range, &mut svg).map_err(|e| format!("{}: {e}", curve.id))?;
    Ok(Some(svg))
}

fn lines(curve: &Curve, scaling: &Scaling) -> Vec<Line> {
    let line = |id: &&str| {
        let system = systems::named(id)?;
        let place = |(at, x): (usize, &f64)| {
            let rounds = scaling.values(curve.id, id, *x).into_iter();
            let rounds: Vec<f64> = rounds.map(|(_, y)| y).collect();
            Some((at, Summary::of(&rounds)?.median))
        };
        let places = curve.xs.iter().enumerate().filter_map(place);
        Some((system, places.collect()))
    };
    curve.systems.iter().filter_map(line).collect()
}

/// We use (nearly) logarithmic scales for both axes, so that doubling the depth is always one step,
/// and doubling the result has the same height at any value.
fn draw_lines(
    curve: &Curve,
    lines: &[Line],
    range: Summary,
    svg: &mut String,
) -> Result<(), Box<dyn std::error::Error>> {
    // All values rise except for throughput under loss, so there is space in the opposite corner.
    let corner = match curve.vary {
        Vary::Loss => SeriesLabelPosition::LowerLeft,
        _ => SeriesLabelPosition::LowerRight,
    };
    let root = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let last = curve.xs.len() - 1;
    // Leave space for the names at the bottom.
    let (low, high) = (range.min / 3.0, range.max * 1.5);
    let mut chart = ChartBuilder::on(&root)
        .margin(12)
        .caption(curve.title, ("sans-serif", 18))
        .x_label_area_size(44)
        .y_label_area_size(78)
        .build_cartesian_2d(0..last, (low..high).log_scale())?;
    chart
        .configure_mesh()
        .x_labels(curve.xs.len())
        .x_desc(curve.axis)
        .y_desc(curve.measure)
        .x_label_formatter(&|at| curve.xs.get(*at).map_or(String::new(), |x| curve.label(*x)))
        .y_label_formatter(&|y| short(*y))
        .max_light_lines(1)
        .draw()?;
    for (system, line) in lines {
        let colour = COLOURS.iter().find(|(id, _)| *id == system.id);
        let colour = colour.map_or(BLACK, |(_, colour)| *colour);
        let style = colour.stroke_width(2);
        chart
            .draw_series(LineSeries::new(line.iter().copied(), style))?
            .label(system.label)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style));
        chart.draw_series(
            line.iter()
                .map(|place| Circle::new(*place, 3, colour.filled())),
        )?;
    }
    chart
        .configure_series_labels()
        .position(corner)
        .background_style(WHITE)
        .border_style(BLACK)
        .draw()?;
    root.present()?;
    Ok(())
}

fn short(number: f64) -> String {
    let (scale, suffix) = match number {
        n if n >= 1e9 => (1e9, "G"),
        n if n >= 1e6 => (1e6, "M"),
        n if n >= 1e3 => (1e3, "k"),
        _ => (1.0, ""),
    };
    let digits = (number / scale * 10.0).round() / 10.0;
    format!("{digits}{suffix}")
}

#[cfg(test)]
mod tests {
    use super::super::curves::CURVES;
    use super::super::results::Point;
    use super::super::results::tests::provenance;
    use super::*;

    fn point((system, x): (&str, f64), round: usize, y: f64) -> Point {
        Point {
            curve: "depth".into(),
            system: system.into(),
            x,
            round,
            y,
        }
    }

    #[test]
    fn chart_contains_medians_of_systems() {
        let depth = CURVES.iter().find(|curve| curve.id == "depth").unwrap();
        let points = vec![
            point(("srp", 1.0), 1, 100.0),
            point(("srp", 1.0), 2, 900.0),
            point(("srp", 1.0), 3, 200.0),
            point(("srp", 4.0), 1, 400.0),
            point(("nbdkit", 1.0), 1, 50.0),
        ];
        let scaling = Scaling {
            measured: provenance(),
            points,
        };
        let lines = lines(depth, &scaling);
        let srp = lines.iter().find(|(system, _)| system.id == "srp").unwrap();
        assert_eq!(srp.1, [(0, 200.0), (2, 400.0)]);
        let svg = draw(depth, &scaling).unwrap().unwrap();
        for part in ["<svg", depth.title, "SRP", "nbdkit", "256", "</svg>"] {
            assert!(svg.contains(part), "{part} is not in the picture");
        }
        // The same results must create the same chart; otherwise the files would change each time
        // they are rendered.
        assert_eq!(draw(depth, &scaling).unwrap().unwrap(), svg);
    }

    #[test]
    fn curve_without_points_has_no_chart() {
        let scaling = Scaling {
            measured: provenance(),
            points: vec![point(("srp", 1.0), 1, 1.0)],
        };
        for curve in CURVES.iter().filter(|curve| curve.id != "depth") {
            assert_eq!(draw(curve, &scaling).unwrap(), None, "{}", curve.id);
        }
    }

    #[test]
    fn curve_systems_have_colors() {
        for id in CURVES.iter().flat_map(|curve| &curve.systems) {
            assert!(COLOURS.iter().any(|(coloured, _)| coloured == id), "{id}");
        }
    }

    #[test]
    fn axis_numbers_are_abbreviated() {
        let numbers = [0.5, 20.0, 1500.0, 100_000.0, 2_000_000.0, 8.4e9].map(short);
        assert_eq!(numbers.join(" "), "0.5 20 1.5k 100k 2M 8.4G");
    }
}
