//! Indices out of range: compiled code finds them before it overwrites anything. The same for every target:
//! each says in `super::Step` how it builds a graph, and what comes of running it, with the inputs as they
//! were if that is an error.

use kiln_graph::testing::{difference, random_tensor};
use kiln_graph::{DType, Graph, HostTensor, IndexError, Op, interpret_f64};

use super::Step;

/// The error of running `step`; without one the results are those of the interpreter.
fn error_of(step: &Step, graph: &Graph, inputs: &[HostTensor]) -> Option<IndexError> {
    let results = match step.run(graph, inputs) {
        Ok(results) => results,
        Err(error) => return Some(error),
    };
    let expected = interpret_f64(graph, inputs, &[]).unwrap();
    for (number, (result, expected)) in results.iter().zip(&expected).enumerate() {
        let largest = expected.to_f64s().iter().fold(1.0f64, |a, b| a.max(b.abs()));
        let found = difference(result, expected, 1e-5 * largest);
        assert!(found.is_none(), "output {number}: {}", found.unwrap());
    }
    assert_eq!(results.len(), expected.len());
    None
}

/// Every use of indices on elements of one type, its indices being argument `1 + number`.
const USES: [(&str, i64); 8] = [
    ("gather", 7),
    ("index_select", 5),
    ("scatter", 7),
    ("index_put", 7),
    ("max_pool_grad", 16),
    ("index_select", 7),
    ("scatter", 6),
    ("gather", 5),
];

fn every_use(dtype: DType) -> Graph {
    let text = "graph @uses {
        %x = parameter 0 : f32[7,5]
        %i0 = parameter 1 : INT[3,5]
        %i1 = parameter 2 : INT[4]
        %i2 = parameter 3 : INT[3,5]
        %i3 = parameter 4 : INT[4]
        %i4 = parameter 5 : INT[1,2,2,2]
        %i5 = parameter 6 : INT[4]
        %i6 = parameter 7 : INT[5,1]
        %i7 = parameter 8 : INT[7,1]
        %u = parameter 9 : f32[3,5]
        %v = parameter 10 : f32[4,5]
        %dy = parameter 11 : f32[1,2,2,2]
        %zero = constant 0.0 : f32[]
        %hot = broadcast %zero {dims=[]} : f32[5,6]
        %one = constant 1.0 : f32[]
        %ones = broadcast %one {dims=[]} : f32[5,1]
        %a = gather %x, %i0 {axis=0} : f32[3,5]               ; fwd Uses at main.rs:0
        %b = index_select %x, %i1 {axis=1} : f32[7,4]          ; fwd Uses at main.rs:1
        %c = scatter add %x, %i2, %u {axis=0} : f32[7,5]       ; fwd Uses at main.rs:2
        %d = index_put assign %x, %i3, %v {axis=0} : f32[7,5]  ; fwd Uses at main.rs:3
        %e = max_pool_grad %dy, %i4 {input=[4,4]} : f32[1,2,4,4] ; fwd Uses at main.rs:4
        %dead = index_select %x, %i5 {axis=0} : f32[4,5]       ; fwd Uses at main.rs:5
        %f = scatter add %hot, %i6, %ones {axis=1} : f32[5,6]  ; fwd Uses at main.rs:6
        %picked = gather %x, %i7 {axis=1} : f32[7,1]           ; fwd Uses at main.rs:7
        %g = reduce sum %picked {axes=[0,1]} : f32[]           ; fwd
        %new = add %x, %x : f32[7,5]                           ; fwd
        return %new (alias 0), %a, %b, %c, %d, %e, %f, %g
    }";
    Graph::parse(&text.replace("INT", dtype.name())).unwrap()
}

/// Arguments of [`every_use`] with all indices in range.
fn arguments(graph: &Graph, seed: u64) -> Vec<HostTensor> {
    let parameters = graph.parameters().iter().enumerate();
    parameters
        .map(|(number, &value)| {
            let ty = graph.ty(value);
            match number.checked_sub(1).and_then(|at| USES.get(at)) {
                None => random_tensor(ty, seed + number as u64),
                Some(&(_, extent)) => {
                    let element = |at: usize| (at as i64 * 5 + seed as i64 + 3) % extent;
                    HostTensor::from_ints(ty.dtype, ty.shape.clone(), (0..ty.numel()).map(element))
                }
            }
        })
        .collect()
}

#[test]
fn every_use_of_indices_is_checked() {
    for dtype in [DType::I64, DType::I32, DType::U8] {
        let graph = every_use(dtype);
        let step = Step::build(&graph, |_| {});
        assert_eq!(step.aliases()[0], Some(0), "looked at before the update");
        for seed in 0..4 {
            let inputs = arguments(&graph, seed);
            assert_eq!(error_of(&step, &graph, &inputs), None, "in range");
        }
        for (number, &(operation, extent)) in USES.iter().enumerate() {
            let wrong = match dtype {
                DType::U8 => vec![extent, 255],
                DType::I32 => vec![extent, -1, i64::from(i32::MIN), i64::from(i32::MAX)],
                _ => vec![extent, -1, i64::MIN, i64::MAX],
            };
            for index in wrong {
                let mut inputs = arguments(&graph, 1);
                let ty = inputs[1 + number].ty().clone();
                let mut elements = inputs[1 + number].to_i64s();
                let at = (index.unsigned_abs() % elements.len() as u64) as usize;
                elements[at] = index;
                inputs[1 + number] = HostTensor::from_ints(dtype, ty.shape, elements);
                let error = error_of(&step, &graph, &inputs).expect("it is out of range");
                assert_eq!(
                    (&*error.operation, error.index),
                    (operation, index.into()),
                    "{error}"
                );
                assert_eq!(error.extent as i64, extent, "{error}");
                assert_eq!(error.location.as_deref(), Some(&*format!("main.rs:{number}")));
            }
        }
    }
}

#[test]
fn unsigned_indices_beyond_every_signed_number() {
    let graph = Graph::parse(
        "graph @g {
           %x = parameter 0 : f32[9]
           %i = parameter 1 : u64[3]
           %a = gather %x, %i {axis=0} : f32[3]
           return %a
         }",
    )
    .unwrap();
    let step = Step::build(&graph, |_| {});
    let x = random_tensor(graph.ty(graph.parameters()[0]), 1);
    let indices = |last: u64| HostTensor::from_vec([3], [8u64, 0, last]);
    assert_eq!(error_of(&step, &graph, &[x.clone(), indices(7)]), None);
    for wrong in [9, 1 << 63, u64::MAX] {
        let error = error_of(&step, &graph, &[x.clone(), indices(wrong)]).unwrap();
        assert_eq!(error.index, wrong.into());
    }
}

/// A step that updates `%w` in place; `indices` says how those of its last look-up come about, `%new` being
/// the updated `%w`.
fn step_with(indices: &str) -> Graph {
    let text = format!(
        "graph @step {{
           %w = parameter 0 : f32[64,8]
           %ids = parameter 1 : i64[16]
           %m = parameter 2 : f32[64,8]
           %rows = index_select %w, %ids {{axis=0}} : f32[16,8]        ; fwd Embedding at main.rs:1
           %loss = reduce sum %rows {{axes=[0,1]}} : f32[]             ; fwd
           %beta = constant 0.9 : f32[]                                ; opt
           %betas = broadcast %beta {{dims=[]}} : f32[64,8]            ; opt
           %decayed = mul %m, %betas : f32[64,8]                       ; opt
           %zero = constant 0.0 : f32[]                                ; bwd
           %zeros = broadcast %zero {{dims=[]}} : f32[64,8]            ; bwd
           %gradient = index_put add %zeros, %ids, %rows {{axis=0}} : f32[64,8] ; bwd EmbeddingBackward at main.rs:2
           %moment = add %decayed, %gradient : f32[64,8]               ; opt
           %new = sub %w, %moment : f32[64,8]                          ; opt
           {indices}
           %last = index_select %m, %computed {{axis=0}} : f32[16,8]   ; fwd Select at main.rs:3
           %metric = reduce max %last {{axes=[0,1]}} : f32[]           ; fwd
           return %new (alias 0), %moment (alias 2), %loss, %metric
         }}"
    );
    // What depends on an update is no part of the forward pass.
    let (head, tail) = text.split_at(text.find(indices).unwrap());
    let tail = match indices.contains("%new") {
        true => tail.replace("; fwd", "; opt"),
        false => tail.to_owned(),
    };
    Graph::parse(&format!("{head}{tail}")).unwrap()
}

#[test]
fn nothing_is_overwritten_before_the_last_look() {
    let computed = "%two = constant 2 : i64[] ; fwd
           %twos = broadcast %two {dims=[]} : i64[16] ; fwd
           %computed = mul %ids, %twos : i64[16] ; fwd";
    // An index that is made from what the step has just updated.
    let updated = "%line = slice %new {starts=[0,0], limits=[16,1], steps=[1,1]} : f32[16,1] ; fwd
           %scale = constant 100.0 : f32[] ; fwd
           %scales = broadcast %scale {dims=[]} : f32[16,1] ; fwd
           %scaled = mul %line, %scales : f32[16,1] ; fwd
           %flat = reshape %scaled : f32[16] ; fwd
           %computed = cast %flat : i64[16] ; fwd";
    for (indices, in_place) in [(computed, true), (updated, false)] {
        let graph = step_with(indices);
        let step = Step::build(&graph, |_| {});
        let weights = |value: f32| HostTensor::from_vec([64, 8], vec![value; 512]);
        let ids = |last: i64| HostTensor::from_vec([16], (0..15).chain([last]).collect::<Vec<i64>>());
        let aliases = step.aliases();
        assert_eq!(
            aliases[0].is_some(),
            in_place,
            "the update waits for the look, or writes elsewhere"
        );
        let moments = weights(0.0);
        let run = |w: f32, last: i64| error_of(&step, &graph, &[weights(w), ids(last), moments.clone()]);
        // In range, both look-ups: 1e-3 minus as much is row 0.
        assert_eq!(run(1e-3, 31), None);
        let early = run(1e-3, 64).unwrap();
        assert_eq!((early.index, early.location.as_deref()), (64, Some("main.rs:1")));
        let late = if in_place { run(1e-3, 40) } else { run(-1.0, 20) };
        // Row 20 gets its own gradient, -1; the others of the first sixteen as well: 0. The first line that
        // has none is row 15.
        let late = late.unwrap();
        assert_eq!(late.location.as_deref(), Some("main.rs:3"), "{late}");
        assert_eq!(late.index, if in_place { 80 } else { -100 });
    }
}

/// The library that computes a product does not look whether the step was stopped: a state that a product
/// updates, as that of a recurrent layer, has a place of its own.
#[test]
fn a_product_overwrites_no_argument_of_a_step_with_checks() {
    let checked = Graph::parse(
        "graph @p {
           %s = parameter 0 : f32[64,64]
           %w = parameter 1 : f32[64,64]
           %table = parameter 2 : f32[10,64]
           %ids = parameter 3 : i64[64]
           %rows = index_select %table, %ids {axis=0} : f32[64,64] ; fwd Embedding at main.rs:1
           %t = tanh %s : f32[64,64]
           %h = add %t, %rows : f32[64,64]
           %new = dot_general %h, %w {a_batch=[], b_batch=[], a_contract=[1], b_contract=[0]} : f32[64,64]
           return %new (alias 0)
         }",
    )
    .unwrap();
    let step = Step::build(&checked, |_| {});
    let floats = checked.parameters()[..3].iter().enumerate();
    let floats: Vec<HostTensor> = floats
        .map(|(seed, &value)| random_tensor(checked.ty(value), seed as u64))
        .collect();
    let ids =
        |last: i64| HostTensor::from_vec([64], (0..63).map(|at| at % 10).chain([last]).collect::<Vec<_>>());
    let run = |last: i64| {
        let inputs: Vec<HostTensor> = floats.iter().cloned().chain([ids(last)]).collect();
        error_of(&step, &checked, &inputs)
    };
    assert_eq!(run(9), None);
    assert_eq!(run(10).expect("it is out of range").index, 10);
    assert_eq!(step.aliases()[0], None);
}

#[test]
fn unfused_and_untransformed_steps_check_as_well() {
    let graph = every_use(DType::I64);
    for change in [0, 1] {
        let step = Step::build(&graph, |options| match change {
            0 => options.fuse = false,
            _ => options.transform = false,
        });
        for number in 0..USES.len() {
            let mut inputs = arguments(&graph, 1);
            let ty = inputs[1 + number].ty().clone();
            inputs[1 + number] = HostTensor::from_ints(ty.dtype, ty.shape.clone(), vec![-7; ty.numel()]);
            let error = error_of(&step, &graph, &inputs).expect("all of them are negative");
            assert_eq!(error.location.as_deref(), Some(&*format!("main.rs:{number}")));
        }
    }
}

#[test]
fn a_large_tensor_of_indices_is_looked_at_to_its_end() {
    let graph = Graph::parse(
        "graph @g {
           %x = parameter 0 : f32[1000]
           %i = parameter 1 : i64[70000]
           %a = gather %x, %i {axis=0} : f32[70000]
           return %a
         }",
    )
    .unwrap();
    assert!(matches!(graph.nodes().nth(2).unwrap().1.op, Op::Gather { .. }));
    let step = Step::build(&graph, |_| {});
    let x = random_tensor(graph.ty(graph.parameters()[0]), 1);
    for (at, index) in [(0, 1000), (69_999, -1), (35_001, 4000)] {
        let mut indices: Vec<i64> = (0..70_000).map(|at| at % 1000).collect();
        indices[at] = index;
        let inputs = [x.clone(), HostTensor::from_vec([70_000], indices)];
        let error = error_of(&step, &graph, &inputs).unwrap();
        assert_eq!(error.index, index.into());
    }
}
