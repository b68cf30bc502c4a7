//! Steps in which sums of columns follow a product: batch norm's, behind convolutions of single pixels, and
//! the gradient of a bias.

use kiln_graph::Graph;

/// A step whose last product has a nest with sums behind it.
pub struct Summed {
    pub graph: Graph,
    /// How far each output may be from the interpreter's: sums over some ten thousand elements, a few of
    /// which are rounded to the other side.
    pub tolerances: Vec<f64>,
}

/// What a graph says of images.
struct Words {
    /// Spatial extents, those of the window, and their axes.
    plane: String,
    window: String,
    axes: String,
    /// What says that a convolution takes single pixels.
    one: String,
    /// Shapes: the argument's, the convolved image's, the result's.
    base: String,
    image: String,
    result: String,
}

fn words([images, depth, out]: [usize; 3], extents: &[usize]) -> Words {
    let plane = list(extents);
    Words {
        window: list(&vec![1; extents.len()]),
        axes: list(&(2..2 + extents.len()).collect::<Vec<usize>>()),
        one: attributes(extents.len()),
        base: format!("{images},4,{plane}"),
        image: format!("{images},{depth},{plane}"),
        result: format!("{images},{out},{plane}"),
        plane,
    }
}

/// Statistics of channels as batch norm takes them, of `out` channels of images that have `depth`.
fn statistics(dtype: &str, counts: [usize; 3], extents: &[usize]) -> Summed {
    let [_, depth, out] = counts;
    let Words {
        window,
        axes,
        one,
        base,
        image,
        result,
        ..
    } = words(counts, extents);
    let text = format!(
        "graph @statistics_{depth}_{out} {{
  %p = parameter 0 : {dtype}[{base}]
  %u = parameter 1 : {dtype}[{depth},4,{window}]
  %w = parameter 2 : {dtype}[{out},{depth},{window}]
  %s = parameter 3 : f32[{out}]
  %x = conv %p, %u {one} : {dtype}[{image}]
  %y = conv %x, %w {one} : {dtype}[{result}]
  %f = cast %y : f32[{result}]
  %near = broadcast %s {{dims=[1]}} : f32[{result}]
  %d = sub %f, %near : f32[{result}]
  %q = mul %d, %d : f32[{result}]
  %sum = reduce sum %f {{axes=[0,{axes}]}} : f32[{out}]
  %first = reduce sum %d {{axes=[0,{axes}]}} : f32[{out}]
  %second = reduce sum %q {{axes=[0,{axes}]}} : f32[{out}]
{}
  return %out, %sum, %first, %second
}}",
        applied("%f", &result, out)
    );
    Summed {
        graph: parse(&text),
        tolerances: vec![ROUNDING, SUM, SUM, SQUARES],
    }
}

/// The gradient that reaches an activation behind batch norms and a residual: what passes is stored, and
/// summed up with each normalisation's image. The activation is a gentle one: which elements a ReLU lets pass
/// depends on rounding.
fn gradient(dtype: &str, counts: [usize; 3], extents: &[usize], norms: usize) -> Summed {
    let [_, depth, out] = counts;
    let Words {
        plane,
        window,
        axes,
        one,
        base,
        image,
        result,
    } = words(counts, extents);
    let mut lines = vec![
        format!("%p = parameter 0 : {dtype}[{base}]"),
        format!("%u = parameter 1 : {dtype}[{depth},4,{window}]"),
        format!("%w = parameter 2 : {dtype}[{depth},{out},{window}]"),
        format!("%o = parameter 3 : {dtype}[{out},4,{window}]"),
        format!("%dy = conv %p, %u {one} : {dtype}[{image}]"),
        format!(
            "%dx = conv_input_grad %dy, %w {} : {dtype}[{result}]",
            one.replace('}', &format!(", input=[{plane}]}}"))
        ),
        format!("%residual = conv %p, %o {one} : {dtype}[{result}]"),
        format!("%before = cast %residual : f32[{result}]"),
    ];
    let mut next = 4;
    let mut ahead = String::from("%before");
    for norm in 0..norms {
        lines.push(format!("%v{norm} = parameter {next} : {dtype}[{out},4,{window}]"));
        lines.push(format!("%m{norm} = parameter {} : f32[{out}]", next + 1));
        lines.push(format!("%g{norm} = parameter {} : f32[{out}]", next + 2));
        next += 3;
        lines.push(format!("%x{norm} = conv %p, %v{norm} {one} : {dtype}[{result}]"));
        lines.push(format!("%f{norm} = cast %x{norm} : f32[{result}]"));
        for list in ["m", "g"] {
            lines.push(format!(
                "%{list}s{norm} = broadcast %{list}{norm} {{dims=[1]}} : f32[{result}]"
            ));
        }
        lines.push(format!("%c{norm} = sub %f{norm}, %ms{norm} : f32[{result}]"));
        lines.push(format!("%n{norm} = mul %c{norm}, %gs{norm} : f32[{result}]"));
        lines.push(format!("%a{norm} = add {ahead}, %n{norm} : f32[{result}]"));
        ahead = format!("%a{norm}");
    }
    lines.extend([
        "%gentle = constant 0.01 : f32[]".to_owned(),
        format!("%gentles = broadcast %gentle {{dims=[]}} : f32[{result}]"),
        format!("%gate = mul {ahead}, %gentles : f32[{result}]"),
        format!("%share = mul %gate, %gate : f32[{result}]"),
        format!("%wide = cast %dx : f32[{result}]"),
        format!("%both = add %wide, %before : f32[{result}]"),
        format!("%passes = mul %share, %both : f32[{result}]"),
        format!("%kept = cast %passes : {dtype}[{result}]"),
        format!("%g = cast %kept : f32[{result}]"),
        format!("%sum = reduce sum %g {{axes=[0,{axes}]}} : f32[{out}]"),
    ]);
    lines.push(applied("%g", &result, out));
    let mut outputs = String::from("%out, %sum");
    for norm in 0..norms {
        lines.push(format!("%e{norm} = mul %c{norm}, %g : f32[{result}]"));
        lines.push(format!(
            "%t{norm} = reduce sum %e{norm} {{axes=[0,{axes}]}} : f32[{out}]"
        ));
        outputs.push_str(&format!(", %t{norm}"));
    }
    let text = format!(
        "graph @gradient_{depth}_{out}_{norms} {{\n{}\nreturn {outputs}\n}}",
        lines.join("\n")
    );
    Summed {
        graph: parse(&text),
        tolerances: [ROUNDING, SUM].into_iter().chain(vec![SQUARES; norms]).collect(),
    }
}

/// A linear layer's gradient behind a ReLU, and that of the bias.
fn bias(dtype: &str) -> Summed {
    let text = format!(
        "graph @bias_gradient {{
  %dy = parameter 0 : {dtype}[8,163,72]
  %w = parameter 1 : {dtype}[1288,72]
  %x = parameter 2 : {dtype}[8,163,1288]
  %dh = dot_general %dy, %w {{a_contract=[2], b_contract=[1]}} : {dtype}[8,163,1288]
  %zero = constant 0.0 : f32[]
  %zeros = broadcast %zero {{dims=[]}} : f32[8,163,1288]
  %h = cast %x : f32[8,163,1288]
  %hidden = compare le %h, %zeros : bool[8,163,1288]
  %d = cast %dh : f32[8,163,1288]
  %g = select %hidden, %zeros, %d : f32[8,163,1288]
  %out = cast %g : {dtype}[8,163,1288]
  %sum = reduce sum %g {{axes=[0,1]}} : f32[1288]
  return %out, %sum
}}"
    );
    Summed {
        graph: parse(&text),
        tolerances: vec![ROUNDING, SUM],
    }
}

/// Lines that read `value` again with its sum, as `%out`: a step's own outputs would not lie channels-last.
pub(super) fn applied(value: &str, shape: &str, channels: usize) -> String {
    format!(
        "%little = constant 1e-6 : f32[]
  %littles = broadcast %little {{dims=[]}} : f32[{channels}]
  %part = mul %sum, %littles : f32[{channels}]
  %parts = broadcast %part {{dims=[1]}} : f32[{shape}]
  %out = add {value}, %parts : f32[{shape}]"
    )
}

/// Numbers with commas.
pub(super) fn list(numbers: &[usize]) -> String {
    let words: Vec<String> = numbers.iter().map(usize::to_string).collect();
    words.join(",")
}

/// What says that a convolution takes single pixels of so many dimensions.
pub(super) fn attributes(dimensions: usize) -> String {
    let [ones, zeros] = [1, 0].map(|number| list(&vec![number; dimensions]));
    format!("{{stride=[{ones}], pad_low=[{zeros}], pad_high=[{zeros}], dilation=[{ones}], groups=1}}")
}
/// Neighbours in bf16 of what the products here make.
pub(super) const ROUNDING: f64 = 0.75;
pub(super) const SUM: f64 = 60.0;
pub(super) const SQUARES: f64 = 4000.0;

pub(super) fn parse(text: &str) -> Graph {
    Graph::parse(text).unwrap_or_else(|error| panic!("{error}"))
}

/// The same behind products of any depth: those of great depth reach 128, from where on numbers of bf16 are 1
/// apart.
fn rounding(depth: usize) -> f64 {
    if depth > 128 { 2.0 * ROUNDING } else { ROUNDING }
}

/// Sums behind a product that three tensors of f32 meet: where the product is deep, more than shared memory
/// has room for ahead of their use, two rows at a time.
fn residuals(dtype: &str, depth: usize) -> Summed {
    let text = format!(
        "graph @residuals_{depth} {{
  %x = parameter 0 : {dtype}[1304,{depth}]
  %w = parameter 1 : {dtype}[{depth},1288]
  %a = parameter 2 : f32[1304,1288]
  %b = parameter 3 : f32[1304,1288]
  %c = parameter 4 : f32[1304,1288]
  %y = dot_general %x, %w {{a_contract=[1], b_contract=[0]}} : {dtype}[1304,1288]
  %f = cast %y : f32[1304,1288]
  %d = add %f, %a : f32[1304,1288]
  %e = add %d, %b : f32[1304,1288]
  %g = mul %e, %c : f32[1304,1288]
  %out = cast %g : {dtype}[1304,1288]
  %sum = reduce sum %g {{axes=[0]}} : f32[1288]
  return %out, %sum
}}"
    );
    Summed {
        graph: parse(&text),
        tolerances: vec![rounding(depth), SUM],
    }
}

/// A product that two tensors of its shape meet, with a sum of each column. `turned` says of the operands
/// whether neighbours in memory are along the rows (or columns) of the product, not along its depth.
fn layer(dtype: &str, [rows, depth, out]: [usize; 3], turned: [bool; 2]) -> Summed {
    let (left, along_left) = match turned[0] {
        true => ([depth, rows], 0),
        false => ([rows, depth], 1),
    };
    let (right, along_right) = match turned[1] {
        true => ([depth, out], 0),
        false => ([out, depth], 1),
    };
    let [left, right] = [list(&left), list(&right)];
    let text = format!(
        "graph @layer_{rows}_{depth}_{out} {{
  %x = parameter 0 : {dtype}[{left}]
  %w = parameter 1 : {dtype}[{right}]
  %a = parameter 2 : {dtype}[{rows},{out}]
  %b = parameter 3 : {dtype}[{rows},{out}]
  %m = parameter 4 : f32[{out}]
  %y = dot_general %x, %w {{a_contract=[{along_left}], b_contract=[{along_right}]}} : {dtype}[{rows},{out}]
  %f = cast %y : f32[{rows},{out}]
  %af = cast %a : f32[{rows},{out}]
  %bf = cast %b : f32[{rows},{out}]
  %ms = broadcast %m {{dims=[1]}} : f32[{rows},{out}]
  %c = sub %bf, %ms : f32[{rows},{out}]
  %before = add %af, %c : f32[{rows},{out}]
  %d = add %f, %before : f32[{rows},{out}]
  %kept = cast %d : {dtype}[{rows},{out}]
  %g = cast %kept : f32[{rows},{out}]
  %sum = reduce sum %g {{axes=[0]}} : f32[{out}]
  return %kept, %sum
}}"
    );
    Summed {
        graph: parse(&text),
        tolerances: vec![rounding(depth), SUM],
    }
}

/// Steps whose product one group multiplies, by a right operand that stays in shared memory: of one step of
/// the depth to four, of several tiles in a block, the last of which has few rows, and of columns that no
/// tile divides.
pub fn of_one_group(dtype: &str) -> Vec<Summed> {
    vec![
        residuals(dtype, 72),
        layer(dtype, [12_675, 64, 256], [false, true]),
        layer(dtype, [8_483, 128, 264], [false, false]),
        layer(dtype, [12_100, 256, 136], [false, true]),
        layer(dtype, [6_408, 200, 256], [true, false]),
        layer(dtype, [3_152, 72, 520], [true, true]),
        gradient(dtype, [2, 64, 256], &[91, 97], 2),
    ]
}

/// Steps of all shapes of tiles: as wide as the result, several side by side, tall ones, ones of few rows,
/// and columns that no tile divides.
pub fn sums(dtype: &str) -> Vec<Summed> {
    vec![
        statistics(dtype, [9, 32, 16], &[107, 109]),
        statistics(dtype, [3, 24, 144], &[64, 67]),
        statistics(dtype, [2, 72, 136], &[77, 81]),
        statistics(dtype, [1, 64, 256], &[79, 83]),
        gradient(dtype, [5, 16, 24], &[119, 121], 0),
        gradient(dtype, [5, 104, 32], &[101, 103], 1),
        gradient(dtype, [3, 64, 96], &[75, 77], 1),
        gradient(dtype, [3, 64, 128], &[66, 67], 1),
        gradient(dtype, [2, 40, 200], &[64, 65], 2),
        // Sequences, and volumes.
        statistics(dtype, [7, 48, 72], &[3300]),
        gradient(dtype, [2, 24, 80], &[11, 31, 32], 1),
        bias(dtype),
        residuals(dtype, 264),
    ]
    .into_iter()
    .chain(of_one_group(dtype))
    .collect()
}
