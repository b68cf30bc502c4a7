//! Convolutions as graphs, with both gradients.

use std::fmt::Write;
use std::sync::atomic::{AtomicUsize, Ordering};

use kiln_cuda::testing::host::differential;
use kiln_graph::Graph;

pub const FLOATS: [&str; 4] = ["f32", "f64", "f16", "bf16"];

/// A convolution, one entry for each spatial dimension.
#[derive(Clone, Copy)]
pub struct Convolution {
    pub images: usize,
    /// Channels of the input and of the result.
    pub channels: [usize; 2],
    pub groups: usize,
    pub input: &'static [usize],
    pub window: &'static [usize],
    pub stride: &'static [usize],
    pub low: &'static [usize],
    pub high: &'static [usize],
    pub dilation: &'static [usize],
}

/// A square convolution of two dimensions with the same numbers in both.
pub fn square(
    images: usize,
    channels: [usize; 2],
    groups: usize,
    input: &'static [usize],
    window: &'static [usize],
) -> Convolution {
    Convolution {
        images,
        channels,
        groups,
        input,
        window,
        stride: &[1, 1],
        low: &[0, 0],
        high: &[0, 0],
        dilation: &[1, 1],
    }
}

/// `[a,b,..]`.
pub fn list(numbers: &[usize]) -> String {
    format!("{numbers:?}").replace(' ', "")
}

/// `a,b,..`.
pub fn bare(numbers: &[usize]) -> String {
    list(numbers).trim_matches(['[', ']']).to_owned()
}

/// Lines of a graph that change no element: a pool of single elements, which stores an image with its
/// channels last.
pub fn same(name: &str, of: &str, ty: &str, dimensions: usize) -> String {
    let (ones, zeros) = (list(&vec![1; dimensions]), list(&vec![0; dimensions]));
    format!(
        "  %{name} = avg_pool %{of} {{size={ones}, stride={ones}, pad_low={zeros}, pad_high={zeros}, dilation={ones}}} : {ty}\n"
    )
}

impl Convolution {
    pub fn output(&self) -> Vec<usize> {
        (0..self.input.len())
            .map(|axis| {
                let reach = self.dilation[axis] * (self.window[axis] - 1) + 1;
                (self.input[axis] + self.low[axis] + self.high[axis] - reach) / self.stride[axis] + 1
            })
            .collect()
    }

    /// The convolution and both gradients; channels first, or last.
    pub fn graph(&self, dtype: &str, last: bool) -> Graph {
        self.graph_to(dtype, dtype, last)
    }

    /// The same with results of type `to_type`.
    pub fn graph_to(&self, dtype: &str, to_type: &str, last: bool) -> Graph {
        let [from, to] = self.channels;
        let dims = self.input.len();
        let attributes = format!(
            "stride={}, pad_low={}, pad_high={}, dilation={}, groups={}{}",
            list(self.stride),
            list(self.low),
            list(self.high),
            list(self.dilation),
            self.groups,
            if to_type == dtype {
                String::new()
            } else {
                format!(", result={to_type}")
            }
        );
        let x = format!("{dtype}[{},{from},{}]", self.images, bare(self.input));
        let y = format!("{dtype}[{},{to},{}]", self.images, bare(&self.output()));
        let w = format!("{dtype}[{to},{},{}]", from / self.groups, bare(self.window));
        let result_of = |ty: &String| ty.replacen(dtype, to_type, 1);
        let (to_x, to_y, to_w) = (result_of(&x), result_of(&y), result_of(&w));
        let mut text = format!(
            "graph @convolution {{\n  %0 = parameter 0 : {x}\n  %1 = parameter 1 : {w}\n  %2 = parameter 2 : {y}\n"
        );
        let (mut image, mut gradient) = ("0", "2");
        if last {
            text += &same("3", "0", &x, dims);
            text += &same("4", "2", &y, dims);
            (image, gradient) = ("3", "4");
        }
        let _ = writeln!(text, "  %5 = conv %{image}, %1 {{{attributes}}} : {to_y}");
        let _ = writeln!(
            text,
            "  %6 = conv_input_grad %{gradient}, %1 {{{attributes}, input={}}} : {to_x}",
            list(self.input)
        );
        let _ = writeln!(
            text,
            "  %7 = conv_weight_grad %{image}, %{gradient} {{{attributes}, kernel={}}} : {to_w}",
            list(self.window)
        );
        if last {
            text += &same("8", "5", &to_y, dims);
            text += &same("9", "6", &to_x, dims);
            text += "  return %8, %9, %7\n}";
        } else {
            text += "  return %5, %6, %7\n}";
        }
        parse(&text)
    }
}

pub fn parse(text: &str) -> Graph {
    Graph::parse(text).unwrap_or_else(|error| panic!("{error}:\n{text}"))
}

/// Runs `graph` on the host and compares.
pub fn check(graph: &Graph, what: &str) {
    if let Err(error) = differential(graph) {
        panic!("{what}: {error}\n{graph}");
    }
}

/// Runs `work` on all of `items`, on two threads: most of the time goes into the host's compiler.
pub fn each<T: Sync>(items: &[T], work: impl Fn(&T) + Sync) {
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
                    work(item);
                }
            });
        }
    });
}
