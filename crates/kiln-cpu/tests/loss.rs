//! Cross entropy with its gradient: one kernel reads the logits, and the gradient takes over their memory.

mod support;

use kiln_compiler::schedule::Buffer;
use kiln_compiler::{Keep, memory_curve};
use kiln_cpu::CpuStep;
use kiln_graph::testing::random_arguments;
use kiln_graph::{DType, Graph, HostTensor, Op, Value};
use support::{Setup, check_on};

/// The loss that the step minimizes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Loss {
    /// The mean over all rows.
    Mean,
    /// The same, computed after the gradient.
    MeanAfterwards,
    /// The mean over the rows whose target is not the ignored one.
    Ignoring,
    /// The mean weighted by the targets' classes.
    Weighted,
    /// Against a distribution for each row.
    Soft,
}

const LOSSES: [Loss; 5] = [
    Loss::Mean,
    Loss::MeanAfterwards,
    Loss::Ignoring,
    Loss::Weighted,
    Loss::Soft,
];

/// Rows and classes: few of both, odd ones, so many that the logits count as large, and longer rows than are
/// kept between passes.
const SIZES: [(usize, usize); 4] = [(9, 2), (37, 53), (65, 1031), (9, 66_001)];

/// A step of a linear classifier of `n` rows and `c` classes: the loss and both gradients. The loss's own
/// gradient is a runtime scalar.
fn step(loss: Loss, n: usize, c: usize) -> Graph {
    let k = 5;
    let head = format!(
        "  %x = parameter 0 : f32[{n},{k}] ; fwd
  %w = parameter 1 : f32[{k},{c}] ; fwd
  %t = parameter 2 : i32[{n}] ; fwd
  %weights = parameter 3 : f32[{c}] ; fwd
  %soft = parameter 4 : f32[{n},{c}] ; fwd
  %scale = scalar 0 : f32[] ; bwd
  %logits = dot_general %x, %w {{a_contract=[1], b_contract=[0]}} : f32[{n},{c}] ; fwd
  %most = reduce max %logits {{axes=[1]}} : f32[{n}] ; fwd
  %mosts = broadcast %most {{dims=[0]}} : f32[{n},{c}] ; fwd
  %shifted = sub %logits, %mosts : f32[{n},{c}] ; fwd
  %e = exp %shifted : f32[{n},{c}] ; fwd
  %sum = reduce sum %e {{axes=[1]}} : f32[{n}] ; fwd
  %log = log %sum : f32[{n}] ; fwd
  %logs = broadcast %log {{dims=[0]}} : f32[{n},{c}] ; fwd
  %likely = sub %shifted, %logs : f32[{n},{c}] ; fwd
  %first = constant 0 : i32[] ; fwd
  %last = constant {last} : i32[] ; fwd
  %firsts = broadcast %first {{dims=[]}} : i32[{n}] ; fwd
  %lasts = broadcast %last {{dims=[]}} : i32[{n}] ; fwd
  %least = max %t, %firsts : i32[{n}] ; fwd
  %class = min %least, %lasts : i32[{n}] ; fwd
  %at = reshape %class : i32[{n},1] ; fwd
  %zero = constant 0.0 : f32[] ; fwd
  %zeros = broadcast %zero {{dims=[]}} : f32[{n}] ; fwd
  %count = constant {n}.0 : f32[] ; fwd
",
        last = c - 1
    );
    let picked = format!(
        "  %picked = gather %likely, %at {{axis=1}} : f32[{n},1] ; fwd
  %pick = reshape %picked : f32[{n}] ; fwd
"
    );
    let mean = format!("{picked}  %rows = neg %pick : f32[{n}] ; fwd\n");
    let sum_up = "  %total = reduce sum %rows {axes=[0]} : f32[] ; fwd
  %loss = div %total, %of : f32[] ; fwd
";
    let afterwards = loss == Loss::MeanAfterwards;
    // `%rows` are the losses of rows, `%of` what their sum is divided by, `%by` the weight of each row in the
    // gradient.
    let before = if afterwards { "" } else { &mean };
    let middle = match loss {
        Loss::Mean | Loss::MeanAfterwards => format!(
            "{before}  %one = constant 1.0 : f32[] ; fwd
  %of = mul %count, %one : f32[] ; fwd
  %by = broadcast %one {{dims=[]}} : f32[{n}] ; bwd
"
        ),
        Loss::Ignoring => format!(
            "{picked}  %ignore = constant 1 : i32[] ; fwd
  %ignores = broadcast %ignore {{dims=[]}} : i32[{n}] ; fwd
  %ignored = compare eq %t, %ignores : bool[{n}] ; fwd
  %negative = neg %pick : f32[{n}] ; fwd
  %rows = select %ignored, %zeros, %negative : f32[{n}] ; fwd
  %counts = not %ignored : bool[{n}] ; fwd
  %by = cast %counts : f32[{n}] ; fwd
  %some = reduce sum %by {{axes=[0]}} : f32[] ; fwd
  %one = constant 1.0 : f32[] ; fwd
  %of = max %some, %one : f32[] ; fwd
"
        ),
        Loss::Weighted => format!(
            "{picked}  %by = index_select %weights, %class {{axis=0}} : f32[{n}] ; fwd
  %negative = neg %pick : f32[{n}] ; fwd
  %rows = mul %negative, %by : f32[{n}] ; fwd
  %signed = reduce sum %by {{axes=[0]}} : f32[] ; fwd
  %positive = abs %signed : f32[] ; fwd
  %one = constant 1.0 : f32[] ; fwd
  %of = add %positive, %one : f32[] ; fwd
"
        ),
        Loss::Soft => format!(
            "  %terms = mul %likely, %soft : f32[{n},{c}] ; fwd
  %positive = reduce sum %terms {{axes=[1]}} : f32[{n}] ; fwd
  %rows = neg %positive : f32[{n}] ; fwd
  %one = constant 1.0 : f32[] ; fwd
  %of = mul %count, %one : f32[] ; fwd
  %by = broadcast %one {{dims=[]}} : f32[{n}] ; bwd
"
        ),
    };
    let hot = match loss {
        Loss::Soft => String::new(),
        _ => format!(
            "  %empty = broadcast %zero {{dims=[]}} : f32[{n},{c}] ; bwd
  %column = reshape %factor : f32[{n},1] ; bwd
  %hot = scatter add %empty, %at, %column {{axis=1}} : f32[{n},{c}] ; bwd
"
        ),
    };
    let hot_of_soft = match loss {
        Loss::Soft => format!("  %hot = mul %soft, %factors : f32[{n},{c}] ; bwd\n"),
        _ => String::new(),
    };
    let after = format!("{mean}{sum_up}");
    let (first, then) = if afterwards {
        ("", after.as_str())
    } else {
        (sum_up, "")
    };
    let tail = format!(
        "{first}  %each = div %scale, %of : f32[] ; bwd
  %eaches = broadcast %each {{dims=[]}} : f32[{n}] ; bwd
  %factor = mul %by, %eaches : f32[{n}] ; bwd
  %factors = broadcast %factor {{dims=[0]}} : f32[{n},{c}] ; bwd
{hot}{hot_of_soft}  %sums = broadcast %sum {{dims=[0]}} : f32[{n},{c}] ; bwd
  %p = div %e, %sums : f32[{n},{c}] ; bwd
  %scaled = mul %p, %factors : f32[{n},{c}] ; bwd
  %gradient = sub %scaled, %hot : f32[{n},{c}] ; bwd
{then}  %dx = dot_general %gradient, %w {{a_contract=[1], b_contract=[1]}} : f32[{n},{k}] ; bwd
  %dw = dot_general %x, %gradient {{a_contract=[0], b_contract=[0]}} : f32[{k},{c}] ; bwd
  return %loss, %dx, %dw
"
    );
    Graph::parse(&format!("graph @step {{\n{head}{middle}{tail}}}")).unwrap()
}

fn compiled(graph: &Graph, keep: Keep) -> CpuStep {
    let mut setup = Setup::detect(2);
    setup.options.keep = keep;
    setup.compile(graph).unwrap()
}

fn logits_of(step: &CpuStep) -> Value {
    let mut nodes = step.graph.nodes();
    let product = nodes.find(|(_, node)| matches!(node.op, Op::DotGeneral(_)));
    product.unwrap().1.outputs[0]
}

#[test]
fn one_kernel_reads_the_logits_and_overwrites_them() {
    for loss in LOSSES {
        for (n, c) in SIZES {
            let compiled = compiled(&step(loss, n, c), Keep::default());
            let logits = logits_of(&compiled);
            let text = || {
                let schedule = compiled.schedule.to_text(&compiled.graph);
                format!("{loss:?} {n} x {c}:\n{}\n{schedule}", compiled.graph)
            };
            let kernels = &compiled.schedule.kernels;
            let readers: Vec<_> = kernels
                .iter()
                .filter(|kernel| kernel.reads.contains(&Buffer::Value(logits)))
                .collect();
            let [reader] = readers[..] else {
                panic!("{} kernels read the logits of {}", readers.len(), text())
            };
            let size = compiled.graph.ty(logits).numel();
            let gradient = reader.writes.iter().find(
                |buffer| matches!(buffer, Buffer::Value(value) if compiled.graph.ty(*value).numel() == size),
            );
            let gradient =
                gradient.unwrap_or_else(|| panic!("no gradient is made by the reader of {}", text()));
            let places = &compiled.plan.places;
            assert_eq!(places[gradient], places[&Buffer::Value(logits)], "{}", text());
        }
    }
}

/// Checks `graph`, of `n` rows and `c` classes, with targets of all classes, one outside on each side, and
/// some that are ignored.
fn check(graph: &Graph, (n, c): (usize, usize), what: &str, change: impl FnOnce(&mut Setup)) {
    let (mut tensors, scalars) = random_arguments(graph, 3);
    let targets = (0..n as i64).map(|row| row * 7 % (c as i64 + 2) - 1);
    tensors[2] = HostTensor::from_ints(DType::I32, [n], targets);
    check_on(graph, &(tensors, scalars), what, 1e-4, change);
}

#[test]
fn losses_and_gradients_are_right_on_any_number_of_threads() {
    for loss in LOSSES {
        for (n, c) in SIZES {
            check(&step(loss, n, c), (n, c), &format!("{loss:?} {n} x {c}"), |_| ());
        }
    }
}

#[test]
fn a_memory_budget_holds_and_changes_no_result() {
    let (n, c) = (65, 1031);
    let graph = step(Loss::Ignoring, n, c);
    let peak = compiled(&graph, Keep::default()).plan.arena_bytes as u64;
    // One tensor of logits, which becomes the gradient, and working memory of the products.
    assert!(peak < (n * c * 4 * 2) as u64, "{peak} bytes");
    let Setup { options, target } = Setup::detect(2);
    let curve = memory_curve(&graph, &options, &target).unwrap();
    for budget in curve.iter().map(|point| point.peak) {
        let keep = Keep::Within(budget);
        let arena = compiled(&graph, keep).plan.arena_bytes as u64;
        assert!(arena <= budget, "{arena} bytes within {budget}");
        check(&graph, (n, c), &keep.to_string(), |setup| {
            setup.options.keep = keep
        });
    }
}
