//! Steps in which nests and sums of columns follow a convolution of windows, or the gradient of its input.

use super::sums::{ROUNDING, SQUARES, SUM, Summed, applied, attributes, list, parse};

/// A convolution of images of one dimension or two.
struct Windows<'a> {
    images: usize,
    /// Channels of what is read, and of what is made.
    channels: [usize; 2],
    /// Extents of the convolution's input.
    input: &'a [usize],
    window: &'a [usize],
    stride: &'a [usize],
    low: &'a [usize],
    high: &'a [usize],
    dilation: &'a [usize],
    /// Whether the step computes the gradient of the input.
    gradient: bool,
}

impl Windows<'_> {
    /// Extents of the convolution's result.
    fn results(&self) -> Vec<usize> {
        let along = |axis: usize| {
            let reach = (self.window[axis] - 1) * self.dilation[axis] + 1;
            (self.input[axis] + self.low[axis] + self.high[axis] - reach) / self.stride[axis] + 1
        };
        (0..self.input.len()).map(along).collect()
    }

    fn name(&self) -> String {
        let [depth, out] = self.channels;
        let kind = if self.gradient { "gradient" } else { "result" };
        format!("{kind}_{depth}_{out}_{}", list(self.window).replace(',', "x"))
    }

    /// Lines that make `%y`, its shape, and the axes of its pixels. Images are made by convolutions: a step's
    /// own would not lie channels-last.
    fn lines(&self, dtype: &str) -> (String, String, String) {
        let Self {
            images,
            channels: [depth, out],
            ..
        } = *self;
        let own = self.results();
        let (read, made) = match self.gradient {
            false => (list(self.input), list(&own)),
            true => (list(&own), list(self.input)),
        };
        let [stride, low, high, dilation, window] =
            [self.stride, self.low, self.high, self.dilation, self.window].map(list);
        let one = attributes(self.input.len());
        let ones = list(&vec![1; self.input.len()]);
        let settings =
            format!("stride=[{stride}], pad_low=[{low}], pad_high=[{high}], dilation=[{dilation}], groups=1");
        let (weight, made_by) = match self.gradient {
            false => (format!("{out},{depth}"), format!("conv %x, %w {{{settings}}}")),
            true => (
                format!("{depth},{out}"),
                format!("conv_input_grad %x, %w {{{settings}, input=[{made}]}}"),
            ),
        };
        let shape = format!("{images},{out},{made}");
        let text = format!(
            "  %p = parameter 0 : {dtype}[{images},4,{read}]
  %u = parameter 1 : {dtype}[{depth},4,{ones}]
  %w = parameter 2 : {dtype}[{weight},{window}]
  %x = conv %p, %u {one} : {dtype}[{images},{depth},{read}]
  %y = {made_by} : {dtype}[{shape}]"
        );
        let axes: Vec<usize> = (2..2 + self.input.len()).collect();
        (text, shape, list(&axes))
    }

    /// Statistics of channels, as batch norm takes them.
    fn statistics(&self, dtype: &str) -> Summed {
        let (lines, shape, axes) = self.lines(dtype);
        let [_, out] = self.channels;
        let text = format!(
            "graph @statistics_{} {{
{lines}
  %s = parameter 3 : f32[{out}]
  %f = cast %y : f32[{shape}]
  %near = broadcast %s {{dims=[1]}} : f32[{shape}]
  %d = sub %f, %near : f32[{shape}]
  %q = mul %d, %d : f32[{shape}]
  %sum = reduce sum %d {{axes=[0,{axes}]}} : f32[{out}]
  %second = reduce sum %q {{axes=[0,{axes}]}} : f32[{out}]
{}
  return %out, %sum, %second
}}",
            self.name(),
            applied("%f", &shape, out)
        );
        Summed {
            graph: parse(&text),
            // Numbers of bf16 beyond 256 are 2 apart.
            tolerances: vec![4.0 * ROUNDING, 4.0 * SUM, 4.0 * SQUARES],
        }
    }

    /// Sums behind a convolution whose result is as large as its input, that two more tensors meet.
    fn residuals(&self, dtype: &str) -> Summed {
        let (lines, shape, axes) = self.lines(dtype);
        let [_, out] = self.channels;
        let (one, ones) = (attributes(self.input.len()), list(&vec![1; self.input.len()]));
        let text = format!(
            "graph @residuals_{} {{
{lines}
  %ua = parameter 3 : {dtype}[{out},4,{ones}]
  %ub = parameter 4 : {dtype}[{out},4,{ones}]
  %a = conv %p, %ua {one} : {dtype}[{shape}]
  %b = conv %p, %ub {one} : {dtype}[{shape}]
  %f = cast %y : f32[{shape}]
  %af = cast %a : f32[{shape}]
  %bf = cast %b : f32[{shape}]
  %d = add %f, %af : f32[{shape}]
  %g = add %d, %bf : f32[{shape}]
  %sum = reduce sum %g {{axes=[0,{axes}]}} : f32[{out}]
{}
  return %out, %sum
}}",
            self.name(),
            applied("%g", &shape, out)
        );
        Summed {
            graph: parse(&text),
            tolerances: vec![4.0 * ROUNDING, 4.0 * SUM],
        }
    }

    /// Lines that read `value` by another convolution, whose weight is the argument of this number, as
    /// `%out`.
    fn read_by_another(&self, dtype: &str, value: &str, number: usize) -> String {
        let (_, shape, _) = self.lines(dtype);
        let pixels = shape.splitn(3, ',').nth(2).unwrap();
        let (one, ones) = (attributes(self.input.len()), list(&vec![1; self.input.len()]));
        format!(
            "  %v = parameter {number} : {dtype}[4,{},{ones}]
  %out = conv {value}, %v {one} : {dtype}[{},4,{pixels}]",
            self.channels[1], self.images,
        )
    }

    /// Nothing but another convolution, which reads the result.
    fn alone(&self, dtype: &str) -> Summed {
        let (lines, ..) = self.lines(dtype);
        let text = format!(
            "graph @alone_{} {{
{lines}
{}
  return %out
}}",
            self.name(),
            self.read_by_another(dtype, "%y", 3),
        );
        Summed {
            graph: parse(&text),
            tolerances: vec![40.0],
        }
    }

    /// A bias and an activation, whose result another convolution reads.
    fn activation(&self, dtype: &str) -> Summed {
        let (lines, shape, _) = self.lines(dtype);
        let [_, out] = self.channels;
        let text = format!(
            "graph @activation_{} {{
{lines}
  %b = parameter 3 : f32[{out}]
  %f = cast %y : f32[{shape}]
  %bs = broadcast %b {{dims=[1]}} : f32[{shape}]
  %before = add %f, %bs : f32[{shape}]
  %zero = constant 0.0 : f32[]
  %zeros = broadcast %zero {{dims=[]}} : f32[{shape}]
  %h = max %before, %zeros : f32[{shape}]
  %kept = cast %h : {dtype}[{shape}]
{}
  return %out
}}",
            self.name(),
            self.read_by_another(dtype, "%kept", 4),
        );
        Summed {
            graph: parse(&text),
            // Sums of some thousand, of which numbers of bf16 are 8 apart, of elements that are rounded, too.
            tolerances: vec![40.0],
        }
    }
}

const ONES: &[usize] = &[1, 1];
const ZEROS: &[usize] = &[0, 0];

/// A convolution without padding, strides and gaps.
const PLAIN: Windows<'_> = Windows {
    images: 2,
    channels: [64, 72],
    input: &[107, 109],
    window: ONES,
    stride: ONES,
    low: ZEROS,
    high: ZEROS,
    dilation: ONES,
    gradient: false,
};

/// Steps of all kinds of windows: with as much padding on both sides and with more on one, more than a window
/// reaches, with strides and gaps, of one dimension; tiles that end in another image than they begin in, and
/// ones that end behind the last.
pub fn windows(dtype: &str) -> Vec<Summed> {
    let usual = Windows {
        window: &[3, 3],
        low: ONES,
        high: ONES,
        ..PLAIN
    };
    vec![
        usual.activation(dtype),
        Windows {
            gradient: true,
            ..usual
        }
        .statistics(dtype),
        Windows {
            images: 7,
            channels: [128, 64],
            input: &[60, 63],
            window: &[2, 1],
            high: &[1, 0],
            ..PLAIN
        }
        .statistics(dtype),
        Windows {
            channels: [64, 136],
            input: &[157, 161],
            window: &[1, 2],
            stride: &[2, 2],
            low: &[0, 3],
            high: &[1, 0],
            ..PLAIN
        }
        .statistics(dtype),
        // Single pixels, every other one.
        Windows {
            channels: [64, 256],
            input: &[119, 113],
            stride: &[2, 2],
            ..PLAIN
        }
        .statistics(dtype),
        Windows {
            channels: [64, 200],
            input: &[66, 71],
            window: &[2, 2],
            low: &[3, 1],
            high: &[0, 4],
            dilation: &[3, 4],
            ..PLAIN
        }
        .activation(dtype),
        Windows {
            channels: [64, 96],
            input: &[93, 95],
            window: &[3, 1],
            low: &[2, 0],
            dilation: &[2, 1],
            gradient: true,
            ..PLAIN
        }
        .activation(dtype),
        // One group multiplies, by a weight that stays in shared memory: both ways.
        Windows {
            channels: [64, 136],
            input: &[81, 79],
            window: &[1, 2],
            low: &[0, 1],
            ..PLAIN
        }
        .residuals(dtype),
        Windows {
            channels: [64, 136],
            input: &[81, 79],
            window: &[2, 2],
            low: &[1, 0],
            high: &[0, 1],
            gradient: true,
            ..PLAIN
        }
        .residuals(dtype),
        // The gradient of what lies in the padding.
        Windows {
            images: 3,
            channels: [64, 264],
            input: &[47, 49],
            window: &[1, 2],
            low: &[2, 4],
            high: &[3, 0],
            gradient: true,
            ..PLAIN
        }
        .statistics(dtype),
        Windows {
            images: 5,
            channels: [192, 80],
            input: &[4_300],
            window: &[2],
            stride: &[1],
            low: &[1],
            high: &[0],
            dilation: &[1],
            gradient: false,
        }
        .statistics(dtype),
        Windows {
            images: 5,
            channels: [64, 80],
            input: &[4_301],
            window: &[3],
            stride: &[1],
            low: &[1],
            high: &[1],
            dilation: &[1],
            gradient: true,
        }
        .activation(dtype),
    ]
}

/// The same with nothing behind it, which the template computes where it is faster than cuDNN.
pub fn windows_alone(dtype: &str) -> Vec<Summed> {
    let usual = Windows {
        images: 3,
        window: &[3, 3],
        low: ONES,
        high: ONES,
        input: &[17, 19],
        ..PLAIN
    };
    vec![
        usual.alone(dtype),
        Windows {
            channels: [128, 264],
            gradient: true,
            ..usual
        }
        .alone(dtype),
        Windows {
            channels: [64, 16],
            stride: &[2, 3],
            dilation: &[2, 1],
            ..usual
        }
        .alone(dtype),
    ]
}
