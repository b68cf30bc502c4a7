//! Planted faults of each kind, in graphs that have much besides, and what is left of them.
//!
//! The backend is the compiler's stub target, with faults: it computes one operation wrongly, does not
//! compile a shape, fails when it runs, or ends the process.

use std::time::Duration;

use kiln_compiler::testing::Stub;
use kiln_compiler::{CompileError, Options, compile};
use kiln_graph::op::{BinaryOp, UnaryOp};
use kiln_graph::testing::{Family, GraphConfig, random_graph};
use kiln_graph::{Graph, HostTensor, Op, Rewriter, Scalar};
use kiln_minify::{
    Case, ChildProbe, Failure, Fault, Fill, Limits, Minified, Subject, minify, observe, print_verdict,
    provoke,
};

/// Tells a child process of these tests which fault to plant.
const PLANTED: &str = "KILN_MINIFY_TEST_PLANTED";

/// What is wrong with the backend.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Planted {
    Nothing,
    /// The hyperbolic tangent is a sine.
    WrongTanh,
    /// Tensors with a dimension of more than 20 do not compile if something is sorted.
    LongSorts,
    /// Running a product fails where it has more than three rows.
    ManyRows,
    /// The maximum of two tensors ends the process.
    AbortingMax,
    /// The maximum of two tensors takes forever.
    EndlessMax,
}

impl Planted {
    fn of_name(name: &str) -> Self {
        let all = [Self::WrongTanh, Self::AbortingMax, Self::EndlessMax];
        let named = all.into_iter().find(|planted| format!("{planted:?}") == name);
        named.unwrap_or(Self::Nothing)
    }
}

fn any(graph: &Graph, op: impl Fn(&Op) -> bool) -> bool {
    graph.nodes().any(|(_, data)| op(&data.op))
}

/// `graph` with sines in place of hyperbolic tangents.
fn with_sines(graph: &Graph) -> Graph {
    let mut new = Rewriter::new(graph);
    for (node, data) in graph.nodes() {
        let op = match &data.op {
            Op::Unary(UnaryOp::Tanh) => Op::Unary(UnaryOp::Sin),
            op => op.clone(),
        };
        new.copy_as(node, op).unwrap();
    }
    new.finish()
}

/// The first tensor that has a dimension of more than 20, if something is sorted.
fn long_sort(graph: &Graph) -> Option<String> {
    let is_long = |extent: &usize| *extent > 20;
    let mut long = graph
        .values()
        .filter(|(_, data)| data.ty.shape.dims().iter().any(is_long));
    let (value, data) = long.next()?;
    any(graph, |op| matches!(op, Op::Sort { .. })).then(|| format!("no code for {value} of {}", data.ty))
}

/// The rows of the first product with more than three.
fn many_rows(graph: &Graph) -> Option<usize> {
    let products = graph
        .nodes()
        .filter(|(_, data)| matches!(data.op, Op::DotGeneral(_)));
    let rows = |value| graph.shape(value).dims().first().copied().unwrap_or(1);
    products
        .map(|(_, data)| rows(data.outputs[0]))
        .find(|&rows| rows > 3)
}

struct Backend(Planted);

impl Subject for Backend {
    fn run(
        &self,
        graph: &Graph,
        inputs: &[HostTensor],
        scalars: &[Scalar],
    ) -> Result<Vec<HostTensor>, Failure> {
        let has_max = any(graph, |op| *op == Op::Binary(BinaryOp::Max));
        match self.0 {
            Planted::AbortingMax if has_max => std::process::abort(),
            Planted::EndlessMax if has_max => std::thread::sleep(Duration::from_secs(3600)),
            Planted::LongSorts => {
                if let Some(message) = long_sort(graph) {
                    return Err(Failure::Refused(message));
                }
            }
            Planted::ManyRows => {
                if let Some(rows) = many_rows(graph) {
                    return Err(Failure::Failed(format!("{rows} rows are too many")));
                }
            }
            _ => {}
        }
        let graph = match self.0 {
            Planted::WrongTanh => with_sines(graph),
            _ => graph.clone(),
        };
        let refused = |error: CompileError| Failure::Refused(error.to_string());
        let step = compile(&graph, &Options::default(), &Stub::default()).map_err(refused)?;
        let outputs = step.code.run(&mut inputs.to_vec(), scalars);
        outputs.map_err(|error| Failure::Failed(error.to_string()))
    }
}

fn fault(planted: Planted, case: &Case) -> Option<Fault> {
    observe(case, &Backend(planted), 1e-4).ok()?
}

/// Minifies `graph` in this process, and checks that what is left shows the fault by itself, from its text.
fn minified(graph: Graph, planted: Planted) -> Minified {
    let case = Case::new(graph, Fill::Signed, 5);
    let small = minify(case, &mut |case| fault(planted, case), &Limits::default()).expect("the fault shows");
    assert!(small.complete);
    let text = small.to_text("some command");
    assert!(Case::has_arguments(&text) && text.starts_with("// repeated by: some command\n// fault: "));
    let again = Case::parse(&text, Fill::Positive, 1).unwrap();
    assert_eq!(again.graph, small.case.graph);
    assert_eq!(again.arguments(), small.case.arguments());
    assert_eq!(fault(planted, &again), Some(small.fault.clone()));
    assert_eq!(
        fault(Planted::Nothing, &again),
        None,
        "the graph is right elsewhere"
    );
    small
}

/// The operations that are left, but for arguments.
fn ops(minified: &Minified) -> Vec<&'static str> {
    let nodes = minified.case.graph.nodes();
    let names = nodes.map(|(_, data)| data.op.name());
    names
        .filter(|name| !["parameter", "scalar"].contains(name))
        .collect()
}

/// A layer, its loss, a gradient and an update, with `inner` between the layer and the loss.
fn step(inner: &str) -> Graph {
    let text = format!(
        "graph @step {{
  %x = parameter 0 : f32[32,24]
  %w = parameter 1 : f32[24,48]
  %b = parameter 2 : f32[48]
  %rate = scalar 0 : f32[]
  %z = dot_general %x, %w {{a_contract=[1], b_contract=[0]}} : f32[32,48]
  %bias = broadcast %b {{dims=[1]}} : f32[32,48]
  %y = add %z, %bias : f32[32,48]
  %e = exp %y : f32[32,48]
{inner}
  %s = reduce sum %t {{axes=[0]}} : f32[48]
  %loss = reduce sum %s {{axes=[0]}} : f32[]
  %flat = reshape %t : f32[1536]
  %square = mul %flat, %flat : f32[1536]
  %rates = broadcast %rate {{dims=[]}} : f32[48]
  %step = mul %s, %rates : f32[48]
  %next = sub %b, %step : f32[48]
  return %loss, %next (alias 2), %square
}}"
    );
    Graph::parse(&text).unwrap()
}

const TANH: &str = "  %t = tanh %e : f32[32,48]";

#[test]
fn a_wrong_operation_is_left_alone_on_one_element() {
    let inner = "  %half = sqrt %e : f32[32,48]\n  %t = tanh %half : f32[32,48]";
    let small = minified(step(inner), Planted::WrongTanh);
    assert_eq!(ops(&small), ["tanh"], "{}", small.case.to_text());
    let ty = small.case.graph.ty(small.case.graph.outputs[0].value);
    assert_eq!(ty.numel(), 1, "{ty}");
    assert!(matches!(small.fault, Fault::Differs { output: 0, .. }));
    assert_eq!(small.case.intervals.len(), 1);
    assert!(
        small.case.intervals[0].low > 0.0,
        "roots are positive, and so is what stands for them"
    );
}

#[test]
fn a_shape_that_does_not_compile_stays_as_large_as_it_must() {
    let small = minified(
        step("  %t, %at = sort %e {axis=1} : f32[32,48], i64[32,48]"),
        Planted::LongSorts,
    );
    assert_eq!(ops(&small), ["sort"], "{}", small.case.to_text());
    let (_, value) = small.case.graph.values().next().unwrap();
    let mut dims = value.ty.shape.dims().to_vec();
    dims.sort_unstable();
    assert_eq!(dims, [1, 21], "{}", small.case.to_text());
}

#[test]
fn a_run_that_fails_keeps_its_message_but_for_numbers() {
    let small = minified(step(TANH), Planted::ManyRows);
    assert_eq!(ops(&small), ["dot_general"], "{}", small.case.to_text());
    let product = small.case.graph.outputs[0].value;
    assert_eq!(
        small.case.graph.shape(product).dims(),
        [4, 1],
        "{}",
        small.case.to_text()
    );
    assert_eq!(small.fault, Fault::Failed("4 rows are too many".into()));
}

#[test]
fn random_graphs_keep_the_wrong_operation_alone() {
    let config = GraphConfig {
        families: vec![Family::Pointwise, Family::Movement, Family::Reduce],
        ..GraphConfig::default()
    };
    let mut shown = 0;
    for seed in 0..60 {
        let graph = random_graph(seed, &config).graph;
        let case = Case::new(graph, Fill::Signed, seed);
        if !matches!(fault(Planted::WrongTanh, &case), Some(Fault::Differs { .. })) {
            continue;
        }
        shown += 1;
        let mut oracle = |case: &Case| fault(Planted::WrongTanh, case);
        let small = minify(case, &mut oracle, &Limits::default()).unwrap();
        assert_eq!(ops(&small), ["tanh"], "seed {seed}\n{}", small.case.to_text());
    }
    assert!(shown > 0, "no random graph has the operation");
}

#[test]
fn what_has_no_fault_is_not_minified() {
    let case = Case::new(step(TANH), Fill::Signed, 5);
    let mut oracle = |case: &Case| fault(Planted::Nothing, case);
    assert!(minify(case, &mut oracle, &Limits::default()).is_none());
}

#[test]
fn a_limit_ends_the_search_with_the_best_so_far() {
    let case = Case::new(step(TANH), Fill::Signed, 5);
    let limits = Limits {
        attempts: 4,
        ..Limits::default()
    };
    let mut oracle = |case: &Case| fault(Planted::WrongTanh, case);
    let small = minify(case.clone(), &mut oracle, &limits).unwrap();
    assert!(!small.complete && small.attempts <= 4);
    assert!(fault(Planted::WrongTanh, &small.case).is_some());
    assert!(small.case.graph.num_nodes() < case.graph.num_nodes());
}

#[test]
fn arguments_are_found_on_which_a_fault_shows() {
    // Of negative numbers the root is NaN, here as there.
    let inner = "  %root = sqrt %y : f32[32,48]\n  %t = tanh %root : f32[32,48]";
    let mut oracle = |case: &Case| fault(Planted::WrongTanh, case);
    let case = provoke(&step(inner), &mut oracle).expect("the fault shows");
    assert!(fault(Planted::WrongTanh, &case).is_some());
    assert!(provoke(&step("  %t = sqrt %y : f32[32,48]"), &mut oracle).is_none());
    // What only a front end knows is an argument.
    let unknown = "graph @g {
  %x = parameter 0 : f32[4]
  %y = extern \"unknown\" %x {attributes=\"\"} : f32[4]
  %t = tanh %y : f32[4]
  return %t
}";
    let case = provoke(&Graph::parse(unknown).unwrap(), &mut oracle).expect("the fault shows");
    assert_eq!(case.graph.num_nodes(), 2);
}

#[test]
fn indices_are_in_range() {
    let text = "graph @g {
  %table = parameter 0 : f32[7,4]
  %ids = parameter 1 : i32[9]
  %column = reshape %ids : i32[9,1]
  %wide = cast %column : i64[9,1]
  %list = reshape %wide : i64[9]
  %rows = index_select %table, %list {axis=0} : f32[9,4]
  return %rows
}";
    let case = Case::new(Graph::parse(text).unwrap(), Fill::Signed, 1);
    assert_eq!((case.intervals[1].low, case.intervals[1].high), (0.0, 6.0));
    assert_eq!(fault(Planted::Nothing, &case), None);
    let mut ids = case.arguments()[1].to_i64s();
    ids.sort_unstable();
    assert!(ids[0] >= 0 && ids[8] <= 6 && ids[0] < ids[8]);
}

/// The child process of the tests below: observes the case that it is given as the last argument.
#[test]
fn child() {
    let Ok(planted) = std::env::var(PLANTED) else {
        return;
    };
    let file = std::env::args().next_back().unwrap();
    let case = Case::parse(&std::fs::read_to_string(file).unwrap(), Fill::Signed, 1).unwrap();
    print_verdict(fault(Planted::of_name(&planted), &case).as_ref());
}

fn probe(planted: Planted, timeout: Duration) -> ChildProbe {
    let test = std::env::current_exe().unwrap().into_os_string();
    // The file, which the probe appends, is one more filter of tests; one that fits is enough.
    let arguments = ["--exact", "child", "--nocapture"].map(Into::into);
    ChildProbe {
        command: std::iter::once(test).chain(arguments).collect(),
        environment: vec![(PLANTED.into(), format!("{planted:?}").into())],
        timeout,
    }
}

#[test]
fn a_crash_is_seen_from_outside_and_minified() {
    let inner = "  %u = max %e, %y : f32[32,48]\n  %t = tanh %u : f32[32,48]";
    let case = Case::new(step(inner), Fill::Signed, 5);
    let probe = probe(Planted::AbortingMax, Duration::from_secs(60));
    let mut oracle = |case: &Case| probe.observe(case).unwrap();
    let small = minify(case, &mut oracle, &Limits::default()).expect("the crash shows");
    assert!(matches!(small.fault, Fault::Crashed(_)), "{}", small.fault);
    assert_eq!(ops(&small), ["max"], "{}", small.case.to_text());
    let result = small.case.graph.outputs[0].value;
    assert_eq!(small.case.graph.shape(result).numel(), 1);
}

#[test]
fn children_answer_as_this_process_does() {
    let case = Case::new(step(TANH), Fill::Signed, 5);
    for planted in [Planted::Nothing, Planted::WrongTanh] {
        let probe = probe(planted, Duration::from_secs(60));
        assert_eq!(
            probe.observe(&case).unwrap(),
            fault(planted, &case),
            "{planted:?}"
        );
    }
}

#[test]
fn a_process_that_does_not_end_is_ended() {
    let case = Case::new(step("  %t = max %e, %y : f32[32,48]"), Fill::Signed, 5);
    let probe = probe(Planted::EndlessMax, Duration::from_millis(1500));
    assert_eq!(probe.observe(&case).unwrap(), Some(Fault::Hung));
}
