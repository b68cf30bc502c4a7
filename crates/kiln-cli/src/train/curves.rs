//! Curves as pictures in SVG: the training loss (every step, and smoothed), the evaluation loss and the
//! learning rate of a run; the effect of memory budgets on a step ([`crate::memory`]).

use std::error::Error;

use plotters::prelude::*;

use super::log::Entry;
use crate::error::CliError;

/// Width of a picture in pixels.
const WIDTH: u32 = 860;
/// Height of its title.
const TITLE: u32 = 36;
/// Most points of a line; more would be finer than the picture.
const POINTS: usize = 1500;

/// One line of a panel.
pub(crate) struct Curve<'a> {
    /// Points, from left to right.
    pub(crate) points: Vec<(f64, f64)>,
    /// Colour of the line.
    pub(crate) colour: RGBColor,
    /// Width of the line in pixels.
    pub(crate) width: u32,
    /// Name in the legend.
    pub(crate) name: &'a str,
}

/// Curves that share their axes.
pub(crate) struct Panel<'a> {
    /// Height in pixels, axes included.
    pub(crate) height: u32,
    /// The curves; a panel without points stays empty.
    pub(crate) curves: Vec<Curve<'a>>,
}

/// A picture of panels below each other, under a title.
///
/// # Errors
///
/// [`CliError::Draw`] if the picture cannot be drawn.
pub(crate) fn picture(title: &str, panels: &[Panel<'_>]) -> Result<String, CliError> {
    let height = TITLE + panels.iter().map(|panel| panel.height).sum::<u32>();
    let mut svg = String::new();
    let drawn = (|| -> Result<(), Box<dyn Error>> {
        let page = SVGBackend::with_string(&mut svg, (WIDTH, height)).into_drawing_area();
        page.fill(&WHITE)?;
        let mut rest = page.titled(title, ("sans-serif", 16))?;
        for panel in panels {
            let (area, below) = rest.split_vertically(panel.height);
            panel.draw(&area)?;
            rest = below;
        }
        page.present()?;
        Ok(())
    })();
    drawn.map_err(|error| CliError::Draw(error.to_string()))?;
    Ok(svg)
}

impl Panel<'_> {
    fn draw(&self, area: &DrawingArea<SVGBackend<'_>, plotters::coord::Shift>) -> Result<(), Box<dyn Error>> {
        let points = || self.curves.iter().flat_map(|curve| curve.points.iter().copied());
        let (Some(x), Some(y)) = (range(points().map(|(x, _)| x)), range(points().map(|(_, y)| y))) else {
            return Ok(());
        };
        let mut chart = ChartBuilder::on(area)
            .margin(8)
            .x_label_area_size(24)
            .y_label_area_size(62)
            .build_cartesian_2d(x.0..x.1, y.0..y.1)?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .y_labels((self.height / 40) as usize)
            .light_line_style(TRANSPARENT)
            .x_label_formatter(&|x| number(*x))
            .y_label_formatter(&|y| number(*y))
            .draw()?;
        for curve in self.curves.iter().filter(|curve| !curve.points.is_empty()) {
            let style = ShapeStyle::from(curve.colour).stroke_width(curve.width);
            chart
                .draw_series(LineSeries::new(curve.points.iter().copied(), style))?
                .label(curve.name)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style));
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperRight)
            .background_style(WHITE.mix(0.8))
            .draw()?;
        Ok(())
    }
}

/// Draws the curves of a log.
///
/// # Errors
///
/// [`CliError::Draw`] if the picture cannot be drawn.
pub fn draw(name: &str, entries: &[Entry]) -> Result<String, CliError> {
    let (mut losses, mut rates, mut evaluations) = (Vec::new(), Vec::new(), Vec::new());
    for entry in entries {
        match *entry {
            Entry::Step { step, loss, rate, .. } => {
                // A loss that is not finite, of a step that was skipped, has no place in a picture.
                if loss.is_finite() {
                    losses.push((step as f64, f64::from(loss)));
                }
                rates.push((step as f64, rate));
            }
            Entry::Evaluation { step, loss, .. } if loss.is_finite() => {
                evaluations.push((step as f64, f64::from(loss)));
            }
            Entry::Evaluation { .. } | Entry::Start | Entry::Checkpoint { .. } => {}
        }
    }
    let smooth = smoothed(&losses);
    let curve = |points, colour, width, name| Curve {
        points,
        colour,
        width,
        name,
    };
    let loss = Panel {
        height: 360,
        curves: vec![
            curve(thin(&losses), RGBColor(184, 203, 224), 1, "loss"),
            curve(thin(&smooth), RGBColor(31, 95, 168), 2, "loss, smoothed"),
            curve(evaluations, RGBColor(200, 80, 30), 2, "evaluation loss"),
        ],
    };
    let rate = Panel {
        height: 140,
        curves: vec![curve(thin(&rates), RGBColor(74, 138, 60), 2, "learning rate")],
    };
    picture(name, &[loss, rate])
}

/// Exponential mean over about a fiftieth of the run.
fn smoothed(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let keep = 1.0 - 1.0 / (points.len() as f64 / 50.0).max(1.0);
    let mut mean = None;
    let next = |&(x, y): &(f64, f64)| {
        let value = mean.map_or(y, |mean: f64| keep * mean + (1.0 - keep) * y);
        mean = Some(value);
        (x, value)
    };
    points.iter().map(next).collect()
}

/// Every n-th point, and the last.
fn thin(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let step = points.len().div_ceil(POINTS).max(1);
    let last = points.len().saturating_sub(1);
    points
        .iter()
        .enumerate()
        .filter(|(index, _)| index % step == 0 || *index == last)
        .map(|(_, &point)| point)
        .collect()
}

/// Least and greatest value, apart from each other; none without values.
fn range(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    let (low, high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| {
        (low.min(value), high.max(value))
    });
    match high - low {
        span if !span.is_finite() => None,
        span if span > 0.0 => Some((low, high)),
        _ => Some((low - 0.5 * low.abs().max(1e-9), high + 0.5 * high.abs().max(1e-9))),
    }
}

fn number(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        small if small < 1e-3 => format!("{value:.0e}"),
        _ => {
            let text = format!("{value:.4}");
            text.trim_end_matches('0').trim_end_matches('.').to_owned()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_picture_stays_inside_its_frame() {
        let step = |step: u64| Entry::Step {
            loss_scale: None,
            skipped: None,
            step,
            loss: 8.0 / step as f32,
            rate: 1e-3,
            seconds: 0.1,
            per_second: 1.0,
            memory_mb: None,
            exposed: None,
        };
        let mut entries: Vec<Entry> = (1..5000).map(step).collect();
        entries.push(Entry::Evaluation {
            step: 5000,
            loss: 0.5,
            accuracy: None,
        });
        let svg = draw("a < b", &entries).unwrap();
        assert!(svg.contains("a &lt; b") && svg.len() < 160_000, "{}", svg.len());
        for name in ["loss, smoothed", "evaluation loss", "learning rate"] {
            assert!(svg.contains(name), "no {name}");
        }
        let mut curves = 0;
        for points in svg.split(" points=\"").skip(1) {
            let points = points.split('"').next().unwrap();
            curves += usize::from(points.split(' ').count() > 1000);
            for point in points.split_whitespace() {
                let (x, y) = point.split_once(',').unwrap();
                assert!(
                    (0.0..=860.0).contains(&x.parse().unwrap())
                        && (0.0..=536.0).contains(&y.parse().unwrap()),
                    "{point}"
                );
            }
        }
        assert_eq!(curves, 3, "loss, its mean and the learning rate");
    }

    #[test]
    fn a_loss_that_is_no_number_is_left_out() {
        let evaluation = |step, loss| Entry::Evaluation {
            step,
            loss,
            accuracy: None,
        };
        let svg = draw(
            "run",
            &[evaluation(1, 2.0), evaluation(2, f32::NAN), evaluation(3, 1.0)],
        )
        .unwrap();
        assert!(svg.contains("polyline") && !svg.contains("NaN"), "{svg}");
        let without = draw("run", &[evaluation(1, 2.0), evaluation(3, 1.0)]).unwrap();
        assert_eq!(svg, without);
    }

    #[test]
    fn an_empty_log_is_an_empty_picture() {
        let svg = draw("run", &[]).unwrap();
        assert!(svg.starts_with("<svg") && !svg.contains("NaN"), "{svg}");
    }
}
