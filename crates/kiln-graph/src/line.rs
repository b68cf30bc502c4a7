//! Graphs that differ in extents alone, and the others on the line through two of them.
//!
//! Two recordings of one program with inputs of two sizes are graphs of one structure in which some numbers differ.
//! What differs as `a * size + b` can be computed for other sizes. Such a graph is well typed, but that a
//! program would record it is a guess: it serves as a sample, and nothing is run in its place.

use crate::Graph;

/// A whole number that differs, in both graphs.
type Pair = (i64, i64);

/// A number that differs, in both graphs.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Number {
    Whole(Pair),
    /// The weight of a mean, and such: in proportion to the reciprocal of a size.
    Fraction(f64, f64),
}

/// The line through two graphs.
#[derive(Clone, Debug)]
pub struct Line {
    /// The text between the numbers that differ; one piece more than numbers.
    pieces: Vec<String>,
    numbers: Vec<Number>,
    sizes: Pair,
}

/// The next word of a graph's text: letters and digits that belong together, white space, or one other character.
fn word(text: &str) -> &str {
    let of_word = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '%' | '+' | '-');
    let end_of = |wanted: &dyn Fn(char) -> bool| text.find(|c| !wanted(c)).unwrap_or(text.len());
    let length = match text.chars().next() {
        Some(c) if of_word(c) => end_of(&of_word),
        Some(' ') => end_of(&|c| c == ' '),
        Some(c) => c.len_utf8(),
        None => 0,
    };
    &text[..length]
}

impl Line {
    /// The line through two graphs; none if they are equal, or differ in more than numbers.
    pub fn through(first: &Graph, second: &Graph) -> Option<Self> {
        let (first, second) = (first.to_string(), second.to_string());
        let (mut one, mut two) = (&*first, &*second);
        let mut pieces = vec![String::new()];
        let mut numbers: Vec<Number> = Vec::new();
        while !one.is_empty() || !two.is_empty() {
            let (a, b) = (word(one), word(two));
            (one, two) = (&one[a.len()..], &two[b.len()..]);
            let blank = |word: &str| word.starts_with(' ');
            if a == b || (blank(a) && blank(b)) {
                pieces.last_mut()?.push_str(a);
                continue;
            }
            numbers.push(match (a.parse(), b.parse()) {
                (Ok(a), Ok(b)) => Number::Whole((a, b)),
                _ => Number::Fraction(a.parse().ok()?, b.parse().ok()?),
            });
            pieces.push(String::new());
        }
        let whole = numbers.iter().filter_map(|number| match number {
            Number::Whole(pair) => Some(*pair),
            Number::Fraction(..) => None,
        });
        let sizes = whole.min_by_key(|(a, b)| ((a - b).abs(), *a.min(b)))?;
        Some(Self {
            pieces,
            numbers,
            sizes,
        })
    }

    /// The smallest of the numbers that differ least, in both graphs: the size of a graph on the line.
    pub fn sizes(&self) -> (i64, i64) {
        self.sizes
    }

    /// How many kinds of numbers differ: 1 if all that differ are the size itself.
    pub fn kinds(&self) -> usize {
        let mut kinds: Vec<Number> = Vec::new();
        for number in &self.numbers {
            if !kinds.contains(number) {
                kinds.push(*number);
            }
        }
        kinds.len()
    }

    /// The graph of a size; none if a number of it would be no whole number or negative, or if operations do not fit.
    pub fn at(&self, size: i64) -> Option<Graph> {
        let (from, to) = self.sizes;
        let mut text = String::with_capacity(self.pieces.iter().map(|piece| piece.len() + 4).sum());
        for (piece, number) in self.pieces.iter().zip(&self.numbers) {
            text.push_str(piece);
            match *number {
                Number::Whole((a, b)) => {
                    let more = (b - a).checked_mul(size - from)?;
                    let number = a + more / (to - from);
                    if more % (to - from) != 0 || number < 0 {
                        return None;
                    }
                    text.push_str(&number.to_string());
                }
                Number::Fraction(a, b) => {
                    let along = (size - from) as f64 / (to - from) as f64;
                    let number = 1.0 / (1.0 / a + (1.0 / b - 1.0 / a) * along);
                    let plausible = number.is_finite() && (number < 0.0) == (a < 0.0);
                    text.push_str(&format!("{:?}", if plausible { number } else { a }));
                }
            }
        }
        text.push_str(self.pieces.last()?);
        Graph::parse(&text).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn graph(text: &str) -> Graph {
        Graph::parse(text).unwrap()
    }

    fn step(length: usize, kept: usize, scale: &str) -> Graph {
        graph(&format!(
            "graph @step {{\n  %0 = parameter 0 : f32[8,{length}]\n  %1 = reshape %0 : f32[{}]\n  %2 = slice %1 \
             {{starts=[1], limits=[{}], steps=[1]}} : f32[{kept}]\n  %3 = constant {scale} : f32[]\n  return %2, %3\n}}\n",
            8 * length,
            kept + 1
        ))
    }

    #[test]
    fn graphs_of_other_sizes_lie_on_the_line() {
        let line = Line::through(&step(37, 36, "0.5"), &step(128, 127, "0.5")).unwrap();
        assert_eq!(line.sizes(), (36, 127));
        assert_eq!(line.at(63).unwrap(), step(64, 63, "0.5"));
        let line = Line::through(&step(33, 32, "0.25"), &step(65, 64, "0.125")).unwrap();
        assert_eq!(line.at(16).unwrap(), step(17, 16, "0.5"));
        assert_eq!(line.at(-3), None, "extents are not negative");
        let line = Line::through(&step(64, 1, "1"), &step(128, 2, "1")).unwrap();
        assert_eq!(line.at(4).unwrap(), step(256, 4, "1"));
    }

    #[test]
    fn other_graphs_are_on_no_line() {
        let one = step(4, 3, "1");
        assert!(Line::through(&one, &one).is_none());
        let other = graph("graph @step {\n  %0 = parameter 0 : f32[8,4]\n  return %0\n}\n");
        assert!(Line::through(&one, &other).is_none());
    }
}
