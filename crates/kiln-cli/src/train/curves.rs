//! Curves of a run as one SVG: training loss (every step, and smoothed), evaluation loss, learning rate.

use std::fmt::Write;

use super::log::Entry;

const WIDTH: f64 = 860.0;
const LOSS: Panel = Panel {
    top: 40.0,
    height: 320.0,
};
const RATE: Panel = Panel {
    top: 410.0,
    height: 90.0,
};
const LEFT: f64 = 70.0;
const RIGHT: f64 = 20.0;
/// Most points of a line; more would be finer than the picture.
const POINTS: usize = 1500;

/// A plotting area.
pub(crate) struct Panel {
    /// Distance from the top of the picture.
    pub(crate) top: f64,
    /// Height.
    pub(crate) height: f64,
}

/// One line of a chart: its points, colour, width and name.
pub(crate) struct Curve<'a> {
    /// Points, from left to right.
    pub(crate) points: Vec<(f64, f64)>,
    /// Colour of the line.
    pub(crate) colour: &'a str,
    /// Width of the line.
    pub(crate) width: f64,
    /// Name in the legend.
    pub(crate) name: &'a str,
}

/// The beginning of a picture of a height, with a title.
pub(crate) fn begin(title: &str, height: f64) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"{LEFT}\" y=\"24\" font-size=\"16\">{}</text>\n",
        escape(title)
    )
}

/// Draws the curves of a log.
pub fn draw(name: &str, entries: &[Entry]) -> String {
    let (mut losses, mut rates, mut evaluations) = (Vec::new(), Vec::new(), Vec::new());
    for entry in entries {
        match *entry {
            Entry::Step { step, loss, rate, .. } => {
                losses.push((step as f64, f64::from(loss)));
                rates.push((step as f64, rate));
            }
            Entry::Evaluation { step, loss, .. } => evaluations.push((step as f64, f64::from(loss))),
        }
    }
    let smooth = smoothed(&losses);
    let mut svg = begin(name, 540.0);
    let loss_curves = [
        Curve {
            points: thin(&losses),
            colour: "#b8cbe0",
            width: 1.0,
            name: "loss",
        },
        Curve {
            points: thin(&smooth),
            colour: "#1f5fa8",
            width: 2.0,
            name: "loss, smoothed",
        },
        Curve {
            points: evaluations,
            colour: "#c8501e",
            width: 2.0,
            name: "evaluation loss",
        },
    ];
    LOSS.draw(&mut svg, &loss_curves);
    RATE.draw(
        &mut svg,
        &[Curve {
            points: thin(&rates),
            colour: "#4a8a3c",
            width: 2.0,
            name: "learning rate",
        }],
    );
    svg.push_str("</svg>\n");
    svg
}

impl Panel {
    /// Draws the curves with axes and a legend.
    pub(crate) fn draw(&self, svg: &mut String, curves: &[Curve<'_>]) {
        let points = || curves.iter().flat_map(|curve| curve.points.iter().copied());
        let Some((x_low, x_high)) = range(points().map(|(x, _)| x)) else {
            return;
        };
        let Some((y_low, y_high)) = range(points().map(|(_, y)| y)) else {
            return;
        };
        let place_x = |x: f64| LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT);
        let place_y = |y: f64| self.top + self.height - (y - y_low) / (y_high - y_low) * self.height;
        let bottom = self.top + self.height;
        for tick in ticks(y_low, y_high, (self.height / 50.0).max(2.0)) {
            let y = place_y(tick);
            let _ = writeln!(
                svg,
                "<path d=\"M{LEFT} {y:.1}H{}\" stroke=\"#e4e4e4\"/>",
                WIDTH - RIGHT
            );
            let _ = writeln!(
                svg,
                "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                LEFT - 6.0,
                y + 4.0,
                number(tick)
            );
        }
        for tick in ticks(x_low, x_high, 8.0) {
            let x = place_x(tick);
            let _ = writeln!(
                svg,
                "<text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
                bottom + 16.0,
                number(tick)
            );
        }
        let _ = writeln!(
            svg,
            "<path d=\"M{LEFT} {}V{bottom}H{}\" fill=\"none\" stroke=\"#888\"/>",
            self.top,
            WIDTH - RIGHT
        );
        let mut legend = LEFT + 12.0;
        for Curve {
            points,
            colour,
            width,
            name,
        } in curves.iter().filter(|curve| !curve.points.is_empty())
        {
            let path: Vec<String> = points
                .iter()
                .map(|&(x, y)| format!("{:.1},{:.1}", place_x(x), place_y(y)))
                .collect();
            let _ = writeln!(
                svg,
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"{width}\"/>",
                path.join(" ")
            );
            let y = self.top + 14.0;
            let _ = writeln!(
                svg,
                "<path d=\"M{legend} {}h18\" stroke=\"{colour}\" stroke-width=\"3\"/>",
                y - 4.0
            );
            let _ = writeln!(svg, "<text x=\"{}\" y=\"{y}\">{name}</text>", legend + 24.0);
            legend += 44.0 + 7.0 * name.len() as f64;
        }
    }
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

/// Round numbers between two bounds, about `count` of them: 1, 2 or 5 times a power of ten apart.
fn ticks(low: f64, high: f64, count: f64) -> Vec<f64> {
    let raw = (high - low) / count;
    let power = 10f64.powf(raw.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .map(|factor| factor * power)
        .find(|&step| step >= raw)
        .unwrap_or(raw);
    let first = (low / step).ceil() as i64;
    let last = (high / step).floor() as i64;
    (first..=last).map(|index| index as f64 * step).collect()
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

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_inside() {
        assert_eq!(ticks(0.0, 10.0, 5.0), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        for (low, high) in [(0.13, 0.97), (-3.0, 250.0), (1e-5, 3e-4)] {
            let ticks = ticks(low, high, 5.0);
            assert!(
                (2..=10).contains(&ticks.len()) && ticks.iter().all(|&tick| tick >= low && tick <= high),
                "{ticks:?}"
            );
        }
    }

    #[test]
    fn a_picture_stays_inside_its_frame() {
        let step = |step: u64| Entry::Step {
            step,
            loss: 8.0 / step as f32,
            rate: 1e-3,
            seconds: 0.1,
            per_second: 1.0,
            memory_mb: None,
        };
        let mut entries: Vec<Entry> = (1..5000).map(step).collect();
        entries.push(Entry::Evaluation {
            step: 5000,
            loss: 0.5,
            accuracy: None,
        });
        let svg = draw("a < b", &entries);
        assert!(svg.contains("a &lt; b") && svg.len() < 120_000);
        for points in svg.split("points=\"").skip(1) {
            let points = points.split('"').next().unwrap();
            for point in points.split(' ') {
                let (x, y) = point.split_once(',').unwrap();
                assert!(
                    (0.0..=WIDTH).contains(&x.parse().unwrap())
                        && (0.0..=540.0).contains(&y.parse().unwrap()),
                    "{point}"
                );
            }
        }
    }

    #[test]
    fn an_empty_log_is_an_empty_picture() {
        assert!(!draw("run", &[]).contains("NaN"));
    }
}
