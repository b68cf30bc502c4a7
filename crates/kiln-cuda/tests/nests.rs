//! Loop nests in CUDA C++, on the host, against the interpreter: each kind of kernel in each element type,
//! with sizes that fit its groups and sizes that do not.

mod common;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use kiln_compiler::{Options, compile};
use kiln_cuda::CudaTarget;
use kiln_cuda::build::{Compiler, Store};
use kiln_cuda::testing::host::{Differential, HostStep, Outcome};
use kiln_graph::op::{BinaryOp, CompareOp, UnaryOp};
use kiln_graph::testing::{Family, GraphConfig, random_graph};
use kiln_graph::{DType, Graph, HostTensor, Scalar, Shape, interpret};

const FLOATS: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];

fn parse(text: &str) -> Graph {
    Graph::parse(text).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

/// Compares a graph, whose outputs may be off by a few roundings.
fn check(text: &str) {
    let graph = parse(text);
    match Differential::new(&graph).check() {
        Ok(Outcome::Same) => {}
        Ok(Outcome::Unsupported(what)) => panic!("{what}"),
        Err(error) => panic!("{error}"),
    }
}

/// Several graphs of parameters only, as one: a compiler run each would be most of the time.
#[derive(Default)]
struct Batch {
    lines: String,
    returns: Vec<String>,
    parameters: usize,
    scalars: usize,
    parts: usize,
}

impl Batch {
    /// Adds lines in which `P` is the next parameter, `S` the next scalar, and the names of values begin with
    /// `%`; `results` are returned.
    fn add(&mut self, lines: &str, results: &[&str]) {
        self.parts += 1;
        let own = |line: &str| line.replace('%', &format!("%p{}_", self.parts));
        let mut text = String::new();
        for line in lines.lines().map(str::trim).filter(|line| !line.is_empty()) {
            let mut line = own(line);
            if line.contains("= parameter P") {
                line = line.replace("parameter P", &format!("parameter {}", self.parameters));
                self.parameters += 1;
            }
            if line.contains("= scalar S") {
                line = line.replace("scalar S", &format!("scalar {}", self.scalars));
                self.scalars += 1;
            }
            let _ = writeln!(text, "  {line}");
        }
        self.lines.push_str(&text);
        self.returns.extend(results.iter().map(|result| own(result)));
    }

    fn text(&self) -> String {
        format!(
            "graph @batch {{\n{}  return {}\n}}",
            self.lines,
            self.returns.join(", ")
        )
    }

    fn check(&self) {
        check(&self.text());
    }

    /// Compiles the kernels for two generations of devices, where NVRTC is.
    fn compile(&self) {
        let graph = parse(&self.text());
        let Some(nvrtc) = common::nvrtc() else { return };
        let step = Differential::new(&graph).compile().unwrap();
        for capability in [(8, 0), (9, 0)] {
            let compiler = Compiler::new(nvrtc.clone(), capability, Store::disabled()).unwrap();
            compiler.compile(&step.code.sources().0).unwrap();
        }
    }
}

#[test]
fn points_of_every_type() {
    let mut batch = Batch::default();
    for dtype in DType::ALL {
        if dtype == DType::Bool {
            continue;
        }
        for count in [1, 3, 8, 1024, 1027] {
            let ty = format!("{dtype}[{count}]");
            batch.add(
                &format!(
                    "%a = parameter P : {ty}\n%b = parameter P : {ty}\n%c = compare lt %a, %b : bool[{count}]\n\
                     %d = add %a, %b : {ty}\n%e = mul %d, %b : {ty}\n%f = max %e, %a : {ty}\n%g = select %c, %f, %d : {ty}"
                ),
                &["%g", "%c"],
            );
        }
    }
    batch.check();
}

#[test]
fn points_with_coordinates_views_and_scalars() {
    let mut batch = Batch::default();
    for dtype in [DType::F32, DType::BF16, DType::I32] {
        for [a, b, c] in [[3, 5, 7], [4, 6, 16], [2, 1, 33]] {
            let ty = |shape: &[i32]| format!("{dtype}{shape:?}").replace(' ', "");
            let whole = ty(&[a, b, c]);
            // A bias, a transposed operand, a flipped and cut one, coordinates, and a scalar.
            batch.add(
                &format!(
                    "%x = parameter P : {whole}\n%bias = parameter P : {bias}\n%t = parameter P : {turned}\n%w = parameter P : {wide}\n%s = scalar S : {dtype}[]\n\
                     %bb = broadcast %bias {{dims=[2]}} : {whole}\n%tt = transpose %t {{perm=[2,1,0]}} : {whole}\n\
                     %ww = slice %w {{starts=[1,0,1],limits=[{a1},{b},{c1}],steps=[1,1,2]}} : {whole}\n%fl = flip %ww {{axes=[0,2]}} : {whole}\n\
                     %i = iota {{axis=1}} : {whole}\n%ss = broadcast %s {{dims=[]}} : {whole}\n\
                     %1 = add %x, %bb : {whole}\n%2 = mul %1, %tt : {whole}\n%3 = add %2, %fl : {whole}\n%4 = sub %3, %i : {whole}\n%5 = mul %4, %ss : {whole}\n\
                     %6 = reshape %5 : {flat}",
                    bias = ty(&[c]),
                    turned = ty(&[c, b, a]),
                    wide = ty(&[a + 1, b, 2 * c + 1]),
                    flat = ty(&[a * b, c]),
                    a1 = a + 1,
                    c1 = 2 * c + 1,
                ),
                &["%6", "%tt"],
            );
        }
    }
    batch.check();
    batch.compile();
}

/// Threads take several rows of their columns: the last product is in place of an operand's memory, as in a step.
#[test]
fn several_rows_of_one_thread() {
    for (dtype, rows) in [(DType::F32, 8_448), (DType::BF16, 16_896)] {
        let text = format!(
            "graph @rows {{
  %x = parameter 0 : {dtype}[{rows},64]
  %m = parameter 1 : f32[64]
  %s = parameter 2 : f32[64]
  %wide = cast %x : f32[{rows},64]
  %ms = broadcast %m {{dims=[1]}} : f32[{rows},64]
  %ss = broadcast %s {{dims=[1]}} : f32[{rows},64]
  %d = sub %wide, %ms : f32[{rows},64]
  %y = mul %d, %ss : f32[{rows},64]
  %out = cast %y : {dtype}[{rows},64]
  return %out
}}"
        );
        let text = match dtype {
            // A cast to its own type is none.
            DType::F32 => text
                .replace("  %wide = cast %x : f32[8448,64]\n", "")
                .replace("%wide", "%x")
                .replace("  %out = cast %y : f32[8448,64]\n", "")
                .replace("return %out", "return %y"),
            _ => text,
        };
        let compiled = compile(&parse(&text), &Options::default(), &CudaTarget::default()).unwrap();
        let [function] = &compiled.code.functions[..] else {
            panic!("{} kernels", compiled.code.functions.len());
        };
        assert!(function.text.body.contains("k < 2"), "{}", function.text.body);
        check(&text);
    }
}

#[test]
fn tensors_read_across() {
    let mut batch = Batch::default();
    for dtype in [DType::F32, DType::BF16, DType::F64, DType::Bool] {
        for [a, b, c] in [[33, 70, 1], [64, 32, 3], [17, 5, 100], [40, 2, 16]] {
            // A transpose alone, and one beside operands that lie as the result does.
            batch.add(
                &format!(
                    "%x = parameter P : {dtype}[{c},{a},{b}]\n%y = parameter P : {dtype}[{b},{c},{a}]\n\
                     %t = transpose %x {{perm=[0,2,1]}} : {dtype}[{c},{b},{a}]\n%u = transpose %y {{perm=[1,0,2]}} : {dtype}[{c},{b},{a}]\n\
                     %v = transpose %x {{perm=[2,0,1]}} : {dtype}[{b},{c},{a}]\n%s = select %q, %t, %u : {dtype}[{c},{b},{a}]",
                )
                .replace("%s = select %q", &format!("%q = compare eq %t, %u : bool[{c},{b},{a}]\n%s = select %q")),
                &["%v", "%s"],
            );
        }
    }
    batch.check();
    batch.compile();
}

#[test]
fn rows_in_registers_and_rows_read_again() {
    for dtype in FLOATS {
        let mut batch = Batch::default();
        for [rows, columns] in [
            [5, 1],
            [7, 3],
            [33, 8],
            [40, 100],
            [64, 1024],
            [3, 5000],
            [2, 33001],
        ] {
            let (whole, row) = (format!("{dtype}[{rows},{columns}]"), format!("{dtype}[{rows}]"));
            // Softmax, and the row's largest as a result of its own.
            batch.add(
                &format!(
                    "%x = parameter P : {whole}\n%m = reduce max %x {{axes=[1]}} : {row}\n%mm = broadcast %m {{dims=[0]}} : {whole}\n\
                     %d = sub %x, %mm : {whole}\n%e = exp %d : {whole}\n%s = reduce sum %e {{axes=[1]}} : {row}\n\
                     %ss = broadcast %s {{dims=[0]}} : {whole}\n%y = div %e, %ss : {whole}"
                ),
                &["%y", "%m"],
            );
        }
        batch.check();
    }
}

/// Rows of 16 bits that a block has alone, and so many of them that a multiprocessor has two blocks:
/// exponentials are computed a second time.
#[test]
fn rows_of_which_a_multiprocessor_has_two() {
    let (narrow, whole, row) = ("bf16[132,16392]", "f32[132,16392]", "f32[132]");
    let mut batch = Batch::default();
    batch.add(
        &format!(
            "%n = parameter P : {narrow}\n%x = cast %n : {whole}\n%m = reduce max %x {{axes=[1]}} : {row}\n\
             %mm = broadcast %m {{dims=[0]}} : {whole}\n%d = sub %x, %mm : {whole}\n%e = exp %d : {whole}\n\
             %s = reduce sum %e {{axes=[1]}} : {row}\n%ss = broadcast %s {{dims=[0]}} : {whole}\n\
             %q = div %e, %ss : {whole}\n%y = cast %q : {narrow}"
        ),
        &["%y"],
    );
    let step = Differential::new(&parse(&batch.text())).compile().unwrap();
    let blocks: Vec<u32> = step
        .code
        .functions
        .iter()
        .map(|function| function.text.blocks)
        .collect();
    assert_eq!(blocks, [2]);
    batch.check();
    batch.compile();
}

#[test]
fn rows_that_neighbouring_threads_have() {
    let mut batch = Batch::default();
    for dtype in [DType::F32, DType::F16, DType::I16, DType::I64] {
        for [rows, columns] in [[3, 40], [17, 7], [64, 300]] {
            batch.add(
                &format!(
                    "%x = parameter P : {dtype}[{rows},{columns}]\n%s = reduce sum %x {{axes=[0]}} : {dtype}[{columns}]\n\
                     %p = reduce prod %x {{axes=[0]}} : {dtype}[{columns}]\n%m = reduce min %x {{axes=[0]}} : {dtype}[{columns}]"
                ),
                &["%s", "%m"],
            );
        }
    }
    batch.check();
}

#[test]
fn every_reduction_of_every_type() {
    let mut batch = Batch::default();
    for dtype in DType::ALL {
        for [rows, columns] in [[40, 5], [33, 65], [2, 700]] {
            let whole = format!("{dtype}[{rows},{columns}]");
            let ops: &[&str] = match dtype {
                DType::Bool => &["any", "all"],
                dtype if dtype.is_float() => &["sum", "max", "min"],
                _ => &["sum", "prod", "max", "min"],
            };
            for op in ops {
                batch.add(
                    &format!(
                        "%x = parameter P : {whole}\n%r = reduce {op} %x {{axes=[1]}} : {dtype}[{rows}]\n\
                         %c = reduce {op} %x {{axes=[0]}} : {dtype}[{columns}]\n%a = reduce {op} %x {{axes=[0,1]}} : {dtype}[]"
                    ),
                    &["%r", "%c", "%a"],
                );
            }
        }
    }
    batch.check();
}

#[test]
fn late_sums_over_rows() {
    for dtype in FLOATS {
        let mut batch = Batch::default();
        for [rows, columns] in [[100, 3], [300, 64], [4000, 33], [70, 1000]] {
            // A gradient that is stored, and the bias gradient beside it.
            batch.add(
                &format!(
                    "%x = parameter P : {dtype}[{rows},{columns}]\n%y = parameter P : {dtype}[{rows},{columns}]\n%g = mul %x, %y : {dtype}[{rows},{columns}]\n\
                     %b = reduce sum %g {{axes=[0]}} : {dtype}[{columns}]"
                ),
                &["%g", "%b"],
            );
        }
        batch.check();
    }
}

#[test]
fn late_sums_beside_rows() {
    for dtype in [DType::F32, DType::BF16, DType::F64] {
        let mut batch = Batch::default();
        for [rows, columns] in [
            [100, 16],
            [300, 100],
            [70, 1024],
            [1000, 12],
            [40, 9000],
            [2200, 768],
        ] {
            let (whole, row, column) = (
                format!("{dtype}[{rows},{columns}]"),
                format!("{dtype}[{rows}]"),
                format!("{dtype}[{columns}]"),
            );
            // The gradient of a normalisation: rows for the input, columns for the weight, everything for a
            // norm.
            batch.add(
                &format!(
                    "%x = parameter P : {whole}\n%dy = parameter P : {whole}\n%g = parameter P : {column}\n\
                     %gg = broadcast %g {{dims=[1]}} : {whole}\n%d = mul %dy, %gg : {whole}\n%p = mul %d, %x : {whole}\n\
                     %s = reduce sum %p {{axes=[1]}} : {row}\n%ss = broadcast %s {{dims=[0]}} : {whole}\n%c = constant 0.0625 : {dtype}[]\n\
                     %cc = broadcast %c {{dims=[]}} : {whole}\n%sc = mul %ss, %cc : {whole}\n%dx = sub %d, %sc : {whole}\n\
                     %q = mul %dy, %x : {whole}\n%dg = reduce sum %q {{axes=[0]}} : {column}\n%db = reduce sum %dy {{axes=[0]}} : {column}"
                ),
                &["%dx", "%dg", "%db"],
            );
        }
        batch.check();
        batch.compile();
    }
}

/// Rows of which a thread would have too much with eight neighbours at a time, in warps of which a quarter
/// would be idle.
#[test]
fn a_warp_has_a_row_by_fours() {
    let (narrow, whole, row, column) = ("bf16[4400,384]", "f32[4400,384]", "f32[4400]", "f32[384]");
    let mut batch = Batch::default();
    batch.add(
        &format!(
            "%x = parameter P : {whole}\n%dy = parameter P : {whole}\n%g = parameter P : {column}\n\
             %r16 = parameter P : {narrow}\n%r = cast %r16 : {whole}\n%gg = broadcast %g {{dims=[1]}} : {whole}\n\
             %d = mul %dy, %gg : {whole}\n%p = mul %d, %x : {whole}\n%s = reduce sum %p {{axes=[1]}} : {row}\n\
             %ss = broadcast %s {{dims=[0]}} : {whole}\n%sx = mul %ss, %x : {whole}\n%e = sub %d, %sx : {whole}\n\
             %f = add %e, %r : {whole}\n%q = mul %dy, %x : {whole}\n%dg = reduce sum %q {{axes=[0]}} : {column}\n\
             %db = reduce sum %dy {{axes=[0]}} : {column}\n%dr = reduce sum %r {{axes=[0]}} : {column}"
        ),
        &["%f", "%dg", "%db", "%dr"],
    );
    let step = Differential::new(&parse(&batch.text())).compile().unwrap();
    let text = &step.code.functions[0].text.body;
    assert!(text.contains("kiln_group<kiln_by_sum, 32>"), "{text}");
    assert!(text.contains("kiln_lanes<kiln_bf16, 4>"), "{text}");
    batch.check();
    batch.compile();
}

/// Two rows abreast, each with four warps, and a sum over all rows of the block behind them: the barrier of a
/// group that is done with its rows is not the one at which the other still waits.
#[test]
fn groups_and_the_block_have_barriers_of_their_own() {
    let (whole, row) = ("f32[1024,130]", "f32[1024]");
    let mut batch = Batch::default();
    batch.add(
        &format!(
            "%x = parameter P : {whole}\n%c = constant 0.0076923077 : f32[]\n%s = reduce sum %x {{axes=[1]}} : {row}\n\
             %cc = broadcast %c {{dims=[]}} : {row}\n%m = mul %s, %cc : {row}\n%mm = broadcast %m {{dims=[0]}} : {whole}\n\
             %d = sub %x, %mm : {whole}\n%q = mul %d, %d : {whole}\n%v = reduce sum %q {{axes=[1]}} : {row}\n\
             %vv = broadcast %v {{dims=[0]}} : {whole}\n%y = mul %q, %vv : {whole}\n%t = reduce sum %y {{axes=[0,1]}} : f32[]\n\
             %u = reduce sum %q {{axes=[0,1]}} : f32[]"
        ),
        &["%y", "%t", "%u"],
    );
    let step = Differential::new(&parse(&batch.text())).compile().unwrap();
    let sizes = |text: &str, function: &str| -> BTreeSet<String> {
        text.split(function)
            .skip(1)
            .filter_map(|rest| Some(rest.split_once(", ")?.1.split_once('>')?.0.to_owned()))
            .collect()
    };
    let mut both = false;
    for function in &step.code.functions {
        let text = &function.text.body;
        let (groups, blocks) = (sizes(text, "kiln_group<"), sizes(text, "kiln_block<"));
        assert!(groups.len() <= 1 && blocks.len() <= 1, "{text}");
        both |= groups.contains("128") && blocks.contains("256");
    }
    assert!(both, "{}", step.code.functions[0].text.body);
    batch.check();
    batch.compile();
}

#[test]
fn sums_of_everything() {
    for dtype in FLOATS {
        let mut batch = Batch::default();
        for shape in [[200, 300], [70001, 1], [37, 1111]] {
            let [rows, columns] = shape;
            batch.add(
                &format!(
                    "%x = parameter P : {dtype}[{rows},{columns}]\n%y = mul %x, %x : {dtype}[{rows},{columns}]\n\
                     %s = reduce sum %x {{axes=[0,1]}} : {dtype}[]\n%m = reduce max %x {{axes=[0,1]}} : {dtype}[]"
                ),
                &["%y", "%s", "%m"],
            );
        }
        batch.check();
    }
}

#[test]
fn random_numbers_have_the_bits_of_the_graph() {
    let mut batch = Batch::default();
    for dtype in FLOATS {
        for kind in ["uniform", "normal"] {
            for count in [8, 13, 2050] {
                batch.add(
                    &format!(
                        "%a = scalar S : u64[]\n%b = scalar S : u64[]\n%r = random {kind} %a, %b : {dtype}[{count},3]"
                    ),
                    &["%r"],
                );
            }
        }
    }
    for dtype in [DType::I64, DType::I32, DType::U8] {
        batch.add(
            &format!(
                "%a = scalar S : u64[]\n%b = scalar S : u64[]\n%l = constant 3 : i64[]\n%h = constant 99 : i64[]\n%r = random int_range %a, %b, %l, %h : {dtype}[41,4]"
            ),
            &["%r"],
        );
    }
    batch.check();
}

#[test]
fn nests_of_many_random_graphs() {
    let mut config = GraphConfig {
        families: vec![
            Family::Pointwise,
            Family::Reduce,
            Family::Movement,
            Family::Index,
            Family::Random,
        ],
        floats: FLOATS.to_vec(),
        ints: DType::ALL.into_iter().filter(|dtype| dtype.is_int()).collect(),
        steps: 4,
        ..GraphConfig::default()
    };
    let mut compared = 0;
    for seed in 0..60 {
        config.max_elements = if seed % 4 == 0 { 3000 } else { 120 };
        let random = random_graph(9000 + seed, &config);
        match Differential::new(&random.graph)
            .tolerances(&random.tolerances)
            .check()
        {
            Ok(Outcome::Same) => compared += 1,
            Ok(Outcome::Unsupported(_)) => {}
            Err(error) => panic!("seed {seed}: {error}\n{}", random.graph),
        }
    }
    assert!(compared > 10, "only {compared} graphs had nests alone");
}

/// Elements that tell operations apart: ends of the range, both zeros, halves, NaN and infinities.
fn edges(dtype: DType, count: usize, shift: usize) -> HostTensor {
    let shape = Shape::from([count]);
    if dtype.is_float() {
        let values = [
            0.0,
            -0.0,
            1.0,
            -1.0,
            0.5,
            -0.5,
            1.5,
            2.5,
            -2.5,
            3.0,
            -7.25,
            100.0,
            88.5,
            -90.0,
            1e-3,
            300.0,
            -70000.0,
            1e10,
            f64::INFINITY,
            f64::NEG_INFINITY,
            f64::NAN,
            0.75,
            -0.25,
            2.0,
            128.0,
            255.5,
            65535.0,
            -128.5,
        ];
        let values = (0..count).map(|i| values[(i * (shift + 1) + i / values.len() + shift) % values.len()]);
        return HostTensor::from_floats(dtype, shape, values);
    }
    let bits = 8 * dtype.size() as u32;
    let (low, high) = match dtype.is_unsigned_int() {
        true => (0, (u64::MAX >> (64 - bits)) as i64),
        false => (i64::MIN >> (64 - bits), i64::MAX >> (64 - bits)),
    };
    let values = [
        0,
        1,
        -1,
        2,
        3,
        -3,
        7,
        31,
        32,
        63,
        64,
        8,
        low,
        high,
        low.wrapping_add(1),
        -8,
        5,
        100,
    ];
    let values = values.map(|value: i64| {
        if dtype.is_unsigned_int() && value < 0 && bits < 64 {
            -value
        } else {
            value
        }
    });
    let values = (0..count).map(|i| values[(i * (shift + 1) + i / values.len() + shift) % values.len()]);
    HostTensor::from_ints(dtype, shape, values)
}

/// One graph with every operation of a type on its edges, compared with the interpreter in the type itself.
fn compare_edges(dtype: DType, operations: &[(String, String)]) {
    const COUNT: usize = 18 * 28;
    let mut text = format!(
        "graph @edges {{\n  %a = parameter 0 : {dtype}[{COUNT}]\n  %b = parameter 1 : {dtype}[{COUNT}]\n"
    );
    for (number, (operation, result)) in operations.iter().enumerate() {
        let _ = writeln!(text, "  %r{number} = {operation} : {result}[{COUNT}]");
    }
    let names: Vec<String> = (0..operations.len())
        .map(|number| format!("%r{number}"))
        .collect();
    let graph = parse(&format!("{text}  return {}\n}}", names.join(", ")));
    let inputs = vec![edges(dtype, COUNT, 0), edges(dtype, COUNT, 4)];
    let differential = Differential::new(&graph).arguments(inputs.clone(), Vec::new());
    let step = HostStep::of(&differential.compile().unwrap()).unwrap();
    let actual = differential.run(&step).unwrap();
    let expected = interpret(&graph, &inputs, &[]).unwrap();
    for (number, (actual, expected)) in actual.iter().zip(&expected).enumerate() {
        let (a, e) = (actual.to_f64s(), expected.to_f64s());
        let epsilon = match expected.ty().dtype {
            DType::F64 => 1e-14,
            DType::F16 => 2e-3,
            DType::BF16 => 1.6e-2,
            _ => 2e-6,
        };
        let agree = |a: f64, e: f64| {
            a == e || (a.is_nan() && e.is_nan()) || (a - e).abs() <= epsilon * e.abs().max(1e-30)
        };
        let exact = !expected.ty().dtype.is_float();
        let wrong = (0..COUNT).find(|&i| match exact {
            true => actual.to_i64s()[i] != expected.to_i64s()[i],
            false => !agree(a[i], e[i]),
        });
        if let Some(i) = wrong {
            let (x, y) = (inputs[0].to_f64s()[i], inputs[1].to_f64s()[i]);
            panic!(
                "{} of {dtype} {x}, {y} is {}, not {}",
                operations[number].0, a[i], e[i]
            );
        }
    }
}

#[test]
fn operations_on_the_edges_of_their_types() {
    for dtype in DType::ALL.into_iter().filter(|dtype| *dtype != DType::Bool) {
        let mut operations: Vec<(String, String)> = Vec::new();
        for op in UnaryOp::ALL {
            let fits = match op {
                UnaryOp::Neg | UnaryOp::Abs | UnaryOp::Sign => true,
                UnaryOp::Not => dtype.is_int(),
                _ => dtype.is_float(),
            };
            let truth = matches!(op, UnaryOp::IsNan | UnaryOp::IsInf);
            if fits {
                operations.push((
                    format!("{op} %a"),
                    if truth { "bool".into() } else { dtype.to_string() },
                ));
            }
        }
        for op in BinaryOp::ALL {
            let fits = match op {
                BinaryOp::And | BinaryOp::Or | BinaryOp::Xor | BinaryOp::Shl | BinaryOp::Shr => {
                    dtype.is_int()
                }
                BinaryOp::Atan2 => dtype.is_float(),
                _ => true,
            };
            if fits {
                operations.push((format!("{op} %a, %b"), dtype.to_string()));
            }
        }
        for op in CompareOp::ALL {
            operations.push((format!("compare {op} %a, %b"), "bool".into()));
        }
        for to in DType::ALL {
            operations.push(("cast %a".into(), to.to_string()));
        }
        compare_edges(dtype, &operations);
    }
}

/// The compiler's own cases, each of which asks for a certain fusion.
#[test]
fn what_the_compiler_fuses() {
    let cases = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kiln-compiler/tests/cases");
    let names = [
        "by_dimension",
        "channels",
        "common",
        "draws",
        "first_piece",
        "first_token",
        "halves",
        "loss",
        "one_hot",
        "placed_parts",
        "small_updates",
        "softmax",
        "update_order",
        "updates_of_slices",
    ];
    for name in names {
        let text = fs::read_to_string(cases.join(format!("{name}.kg"))).unwrap();
        let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with("//")).collect();
        let graph = parse(&lines.join("\n"));
        if let Err(error) = Differential::new(&graph).check() {
            panic!("{name}: {error}");
        }
    }
}

/// Updates of a bucket's gradients read slices of one tensor. Where a slice begins is no reason for a launch of
/// its own.
#[test]
fn updates_of_equal_alignment_share_a_launch() {
    let graph = parse(
        "graph @bucket {
  %first = parameter 0 : f32[48]
  %second = parameter 1 : f32[64]
  %third = parameter 2 : f32[80]
  %odd = parameter 3 : f32[50]
  %sums = parameter 4 : f32[250]
  %large = parameter 5 : f32[40000]
  %1 = slice %sums {starts=[0], limits=[48], steps=[1]} : f32[48]      ; opt
  %2 = sub %first, %1 : f32[48]                                        ; opt
  %3 = slice %sums {starts=[48], limits=[112], steps=[1]} : f32[64]    ; opt
  %4 = sub %second, %3 : f32[64]                                       ; opt
  %5 = slice %sums {starts=[112], limits=[192], steps=[1]} : f32[80]   ; opt
  %6 = sub %third, %5 : f32[80]                                        ; opt
  %7 = slice %sums {starts=[197], limits=[247], steps=[1]} : f32[50]   ; opt
  %8 = sub %odd, %7 : f32[50]                                          ; opt
  return %2 (alias 0), %4 (alias 1), %6 (alias 2), %8 (alias 3)
}",
    );
    if let Err(error) = Differential::new(&graph).check() {
        panic!("{error}");
    }
    let code = compile(&graph, &Options::default(), &CudaTarget::default())
        .unwrap()
        .code;
    let names = || code.functions.iter().map(|function| &function.name);
    // The slice that begins between vectors is read element by element.
    let updates = names().filter(|name| name.starts_with("updates")).count();
    assert_eq!(
        (updates, code.functions.len()),
        (2, 2),
        "{:?}",
        names().collect::<Vec<_>>()
    );
}

/// Where a piece begins in its bucket is no reason for a launch of its own either. What a collective leaves
/// is not computed on the host, so texts alone are looked at; `placed_parts` above compares pieces.
#[test]
fn pieces_of_equal_alignment_share_a_launch() {
    let graph = parse(
        "graph @bucket {
  %a = parameter 0 : bf16[48]
  %b = parameter 1 : bf16[64]
  %c = parameter 2 : bf16[6]
  %d = parameter 3 : bf16[80]
  %p = exp %a : bf16[48]
  %q = exp %b : bf16[64]
  %r = exp %c : bf16[6]
  %s = exp %d : bf16[80]
  %1 = cast %p : f32[48]
  %2 = cast %q : f32[64]
  %3 = cast %r : f32[6]
  %4 = cast %s : f32[80]
  %whole = concat %1, %2, %3, %4 {axis=0} : f32[198]
  %5 = all_reduce %whole {ranks=2, mean=true, started=true} : f32[198]
  %6 = collective_wait %5 : f32[198]
  return %6
}",
    );
    let code = compile(&graph, &Options::default(), &CudaTarget::default())
        .unwrap()
        .code;
    let names: Vec<&str> = code.functions.iter().map(|function| &*function.name).collect();
    // The last piece begins between vectors.
    assert_eq!(names, ["pieces_0", "pieces_1", "collective_wait_2"]);
}

/// The middles between neighbours of 16 bits, and the numbers of f64 beside them: by way of f32 they would be
/// rounded twice.
#[test]
fn an_f64_becomes_16_bits_by_one_rounding() {
    let mut numbers = Vec::new();
    for bits in (0..0x7f80).step_by(13) {
        let halves = [bits, bits + 1].map(|bits| half::f16::from_bits(bits).to_f64());
        let brains = [bits, bits + 1].map(|bits| half::bf16::from_bits(bits).to_f64());
        for [low, high] in [halves, brains] {
            let middle = low / 2.0 + high / 2.0;
            let beside = [middle.next_down(), middle, middle.next_up(), -middle.next_up()];
            numbers.extend(beside.into_iter().filter(|number| number.is_finite()));
        }
    }
    let text = format!(
        "graph @casts {{
  %x = parameter 0 : f64[{n}]
  %s = scalar 0 : f16[]
  %t = scalar 1 : bf16[]
  %half = cast %x : f16[{n}]
  %brain = cast %x : bf16[{n}]
  %ss = broadcast %s {{dims=[]}} : f16[5]
  %tt = broadcast %t {{dims=[]}} : bf16[5]
  return %half, %brain, %ss, %tt
}}",
        n = numbers.len()
    );
    let graph = parse(&text);
    let inputs = vec![HostTensor::from_vec(Shape::new([numbers.len()]), &numbers)];
    let above = [11, 8].map(|digit| Scalar::Float((1.0 + 2f64.powi(-digit)).next_up()));
    let expected = interpret(&graph, &inputs, &above).unwrap();
    let comparison = Differential::new(&graph).arguments(inputs, above.to_vec());
    let host = HostStep::of(&comparison.compile().unwrap()).unwrap();
    let actual = comparison.run(&host).unwrap();
    assert_eq!(actual, expected);
    for (number, next) in [(2, 10), (3, 7)] {
        assert_eq!(actual[number].to_f64s(), [1.0 + 2f64.powi(-next); 5]);
    }
    let mut batch = Batch::default();
    batch.add(
        "%x = parameter P : f64[70]\n%half = cast %x : f16[70]\n%brain = cast %x : bf16[70]",
        &["%half", "%brain"],
    );
    batch.compile();
}

#[test]
fn indices_and_joins() {
    let mut batch = Batch::default();
    for (dtype, index) in [
        (DType::F32, DType::I64),
        (DType::BF16, DType::I32),
        (DType::F64, DType::U8),
    ] {
        for width in [1, 5, 64] {
            batch.add(
                &format!(
                    "%x = parameter P : {dtype}[10,{width}]\n%i = parameter P : bool[37]\n%n = cast %i : {index}[37]\n\
                     %r = index_select %x, %n {{axis=0}} : {dtype}[37,{width}]\n%two = add %r, %r : {dtype}[37,{width}]\n\
                     %g = parameter P : bool[10,{width}]\n%gn = cast %g : {index}[10,{width}]\n%p = gather %x, %gn {{axis=0}} : {dtype}[10,{width}]\n\
                     %e = mul %p, %x : {dtype}[10,{width}]\n%j = concat %two, %x, %e {{axis=0}} : {dtype}[57,{width}]\n\
                     %k = concat %x, %e {{axis=1}} : {dtype}[10,{}]",
                    2 * width
                ),
                &["%two", "%j", "%k"],
            );
        }
    }
    batch.check();
    batch.compile();
}

#[test]
fn results_take_over_arguments() {
    // An update in place, a softmax in place, and a loss's gradient over its logits, of which one element of
    // each row is read apart.
    for (count, classes) in [(64, 1000), (33, 129), (40, 7)] {
        let text = format!(
            "graph @in_place {{
  %w = parameter 0 : f32[{count},{classes}]
  %g = parameter 1 : f32[{count},{classes}]
  %x = parameter 2 : f32[{count},{classes}]
  %t = parameter 3 : bool[{count},1]
  %r = scalar 0 : f32[]
  %rr = broadcast %r {{dims=[]}} : f32[{count},{classes}]
  %u = mul %g, %rr : f32[{count},{classes}]
  %w2 = sub %w, %u : f32[{count},{classes}]
  %m = reduce max %x {{axes=[1]}} : f32[{count}]
  %mm = broadcast %m {{dims=[0]}} : f32[{count},{classes}]
  %d = sub %x, %mm : f32[{count},{classes}]
  %e = exp %d : f32[{count},{classes}]
  %s = reduce sum %e {{axes=[1]}} : f32[{count}]
  %ss = broadcast %s {{dims=[0]}} : f32[{count},{classes}]
  %y = div %e, %ss : f32[{count},{classes}]
  %i = cast %t : i64[{count},1]
  %p = gather %x, %i {{axis=1}} : f32[{count},1]
  %l = log %s : f32[{count}]
  %pr = reshape %p : f32[{count}]
  %lm = add %l, %m : f32[{count}]
  %loss = sub %lm, %pr : f32[{count}]
  return %w2 (alias 0), %y (alias 2), %loss
}}"
        );
        check(&text);
    }
}

/// A tensor without its first element, in its place, with a maximum: one row, of which one element is read
/// apart by threads that may be behind those that store it.
#[test]
fn a_single_row_takes_over_an_argument() {
    for count in [4096, 100] {
        let text = format!(
            "graph @in_place {{
  %x = parameter 0 : f32[{count}]
  %s = slice %x {{starts=[0], limits=[1], steps=[1]}} : f32[1]
  %n = reshape %s : f32[]
  %b = broadcast %n {{dims=[]}} : f32[{count}]
  %y = sub %x, %b : f32[{count}]
  %m = reduce max %y {{axes=[0]}} : f32[]
  return %y (alias 0), %m
}}"
        );
        check(&text);
        let step = compile(&parse(&text), &Options::default(), &CudaTarget::default()).unwrap();
        assert_eq!(step.code.functions.len(), 1, "one kernel reads and stores");
    }
}

/// Tensors of 2^31 elements and more fit into no test, but their kernels compile, and their positions have 64
/// bits.
#[test]
fn positions_beyond_32_bits() {
    let text = "graph @large {
  %x = parameter 0 : bf16[50000,50000]
  %y = parameter 1 : bf16[50000,50000]
  %g = mul %x, %y : bf16[50000,50000]
  %b = reduce sum %g {axes=[0]} : bf16[50000]
  %t = transpose %x {perm=[1,0]} : bf16[50000,50000]
  %r = reduce max %y {axes=[1]} : bf16[50000]
  %s = reduce min %x {axes=[0,1]} : bf16[]
  return %g, %b, %t, %r, %s
}";
    let step = compile(&parse(text), &Options::default(), &CudaTarget::default()).unwrap();
    for function in &step.code.functions {
        let body = &function.text.body;
        let combines = body.contains("* part = ");
        assert!(
            combines || body.contains("(kiln_u64)blockIdx") || body.contains("kiln_u64 tile"),
            "{body}"
        );
        assert!(combines || !body.contains("const kiln_u32"), "{body}");
    }
    let Some(nvrtc) = common::nvrtc() else { return };
    let compiler = Compiler::new(nvrtc, (9, 0), Store::disabled()).unwrap();
    compiler.compile(&step.code.sources().0).unwrap();
}

/// A position is a quotient of a number that has more than 32 bits where the position has not: an element of
/// each row of a broadcast tensor.
#[test]
fn quotients_of_numbers_beyond_32_bits() {
    let text = "graph @diagonal {
  %x = parameter 0 : f32[70000]
  %b = broadcast %x {dims=[0]} : f32[70000,70000]
  %f = reshape %b : f32[4900000000]
  %d = slice %f {starts=[0], limits=[4900000000], steps=[70001]} : f32[70000]
  %y = exp %d : f32[70000]
  return %y
}";
    let step = compile(&parse(text), &Options::default(), &CudaTarget::default()).unwrap();
    let [function] = &step.code.functions[..] else {
        panic!("{} kernels", step.code.functions.len());
    };
    let body = &function.text.body;
    assert!(
        body.contains("* 70001) / 70000") && !body.contains("kiln_u32"),
        "{body}"
    );
}

/// Updates of tensors of any size, and with numbers of their own, share one text and one launch.
#[test]
fn updates_share_a_launch() {
    let mut lines = String::new();
    let mut results = Vec::new();
    let mut parameter = 0;
    for (number, shape) in ["7", "64,33", "1", "4,5,6", "9000"].iter().enumerate() {
        let count: usize = shape
            .split(',')
            .map(|extent| extent.parse::<usize>().unwrap())
            .product();
        let _ = writeln!(
            lines,
            "  %w{number} = parameter {parameter} : f32[{shape}] ; opt\n  %g{number} = parameter {} : f32[{count}] ; bwd\n  %s{number} = scalar {number} : f32[] ; opt\n  \
             %h{number} = reshape %g{number} : f32[{shape}] ; opt\n  %q{number} = mul %h{number}, %h{number} : f32[{shape}] ; opt\n  \
             %b{number} = broadcast %s{number} {{dims=[]}} : f32[{shape}] ; opt\n  %u{number} = mul %q{number}, %b{number} : f32[{shape}] ; opt\n  \
             %r{number} = sub %w{number}, %u{number} : f32[{shape}] ; opt",
            parameter + 1,
        );
        results.push(format!("%r{number} (alias {parameter})"));
        parameter += 2;
    }
    let text = format!(
        "graph @updates {{\n{lines}  %large = parameter {parameter} : f32[100000]\n  return {}\n}}",
        results.join(", ")
    );
    check(&text);
    let step = compile(&parse(&text), &Options::default(), &CudaTarget::default()).unwrap();
    // One element has no variable, and so a text of its own.
    assert_eq!((step.code.functions.len(), step.code.calls.len()), (2, 2));
}

/// Functions are a little off only where all that becomes of their results is rounded to 16 bits.
#[test]
fn what_is_rounded_to_16_bits_may_be_a_little_off() {
    // The functions of a step of `%x` whose results may be.
    let near = |lines: &str, results: &str| {
        let text = format!("graph @near {{\n%x = parameter 0 : f32[64,48]\n{lines}\nreturn {results}\n}}");
        check(&text);
        let step = Differential::new(&parse(&text)).compile().unwrap();
        let bodies: String = step
            .code
            .functions
            .iter()
            .map(|function| function.text.body.as_str())
            .collect();
        let parts = bodies.split("kiln_near_").skip(1);
        let names: BTreeSet<String> = parts
            .map(|part| part.split('(').next().unwrap_or_default().to_owned())
            .collect();
        names.into_iter().collect::<Vec<_>>().join(" ")
    };
    let rounded = "%e = exp %x : f32[64,48]
        %f = erf %e : f32[64,48]
        %r = recip %e : f32[64,48]
        %q = div %f, %r : f32[64,48]
        %y = cast %q : bf16[64,48]";
    assert_eq!(near(rounded, "%y"), "erf exp quotient");
    assert_eq!(
        near(rounded, "%y, %f"),
        "quotient",
        "what comes before %f is exact"
    );
    assert_eq!(near(rounded, "%q"), "", "nothing is rounded");
    // A sum of rounded numbers is one of f32, but nothing before the rounding is.
    let summed = "%zero = cast %y : f32[64,48]
        %sum = reduce sum %zero {axes=[0]} : f32[48]";
    assert_eq!(
        near(&format!("{rounded}\n{summed}"), "%y, %sum"),
        "erf exp quotient"
    );
    // A decision sees what a rounding hides.
    let decided = "%wide = cast %y : f32[64,48]
        %large = compare gt %wide, %x : bool[64,48]
        %z = select %large, %wide, %x : f32[64,48]";
    assert_eq!(near(&format!("{rounded}\n{decided}"), "%z"), "");
    // A logarithm makes small errors of numbers near one large.
    let logarithm = "%e = exp %x : f32[64,48]
        %l = log %e : f32[64,48]
        %s = sqrt %l : f32[64,48]
        %y = cast %s : f16[64,48]";
    assert_eq!(near(logarithm, "%y"), "sqrt");
    // A gradient looks for the largest number of 16 bits by its value, in a kernel that computes it anew.
    let largest = "%e = exp %x : f32[64,48]
        %y = cast %e : bf16[64,48]
        %m = reduce max %y {axes=[1]} : bf16[64]
        %z = tanh %x : f32[64,48]
        %w = cast %z : bf16[64,48]
        %v = min %w, %y : bf16[64,48]";
    assert_eq!(near(largest, "%y, %m, %v"), "");
    // So are they where they were widened before.
    let widened = "%e = exp %x : f32[64,48]
        %y = cast %e : f16[64,48]
        %w = cast %y : f32[64,48]
        %n = neg %w : f32[64,48]
        %m = reduce max %n {axes=[1]} : f32[64]";
    assert_eq!(near(widened, "%y, %m"), "");
    // The largest number of f32 is no number of 16 bits.
    let full = "%e = exp %x : f32[64,48]
        %y = cast %e : f16[64,48]
        %m = reduce max %x {axes=[1]} : f32[64]";
    assert_eq!(near(full, "%y, %m"), "exp");
    // What the backward pass decides by, the forward pass computes as that does. The partition computes it
    // again there: from the same operands, and is cheaper than keeping it.
    let again = |decision: &str| {
        format!(
            "%e = exp %x : f32[64,48] ; fwd
        %y = cast %e : bf16[64,48] ; fwd
        %w = cast %y : f32[64,48] ; fwd
        %sum = reduce sum %w {{axes=[0]}} : f32[48] ; fwd
        %d = parameter 1 : f32[64,48]
        {decision}
        %z = reduce sum %g {{axes=[0]}} : f32[48] ; bwd"
        )
    };
    let decided = again(
        "%large = compare gt %w, %d : bool[64,48] ; bwd
        %g = select %large, %d, %x : f32[64,48] ; bwd",
    );
    assert_eq!(near(&decided, "%sum, %z"), "");
    assert_eq!(
        near(&again("%g = mul %w, %d : f32[64,48] ; bwd"), "%sum, %z"),
        "exp"
    );
    // What is broadcast along a row is as exact as what is made of it.
    let rows = "%s = reduce sum %x {axes=[1]} : f32[64]
        %r = recip %s : f32[64]
        %all = broadcast %r {dims=[0]} : f32[64,48]
        %p = mul %x, %all : f32[64,48]";
    assert_eq!(near(rows, "%p"), "");
    // A sum over a row that is rounded, and what divides by it.
    let softmax = "%e = exp %x : f32[64,48]
        %sum = reduce sum %e {axes=[1]} : f32[64]
        %all = broadcast %sum {dims=[0]} : f32[64,48]
        %p = div %e, %all : f32[64,48]
        %y = cast %p : bf16[64,48]";
    assert_eq!(near(softmax, "%y"), "exp");
}
