//! Operations over ranks: results, types, text form, and the verifier's rules for operations that are only
//! started.

use kiln_graph::verify::Rule;
use kiln_graph::{DType, Graph, HostTensor, InterpretError, Scalar, interpret, interpret_ranks, verify};

fn graph(body: &str) -> Graph {
    let graph = Graph::parse(&format!("graph @ranks {{\n{body}\n}}")).expect("it is well formed");
    verify(&graph).expect("it is sound");
    assert_eq!(Graph::parse(&graph.to_string()).expect("its text parses"), graph);
    graph
}

fn floats(values: &[f64], shape: &[usize]) -> HostTensor {
    HostTensor::from_floats(DType::F32, shape, values.iter().copied())
}

/// The first output of each rank, of which each has one argument.
fn run(graph: &Graph, arguments: &[HostTensor]) -> Vec<Vec<f64>> {
    let none: &[Scalar] = &[];
    let ranks: Vec<_> = arguments
        .iter()
        .map(|it| (std::slice::from_ref(it), none))
        .collect();
    let results = interpret_ranks(graph, &ranks).expect("it runs");
    results.iter().map(|outputs| outputs[0].to_f64s()).collect()
}

#[test]
fn sums_and_means_are_the_same_on_every_rank() {
    let arguments = [
        floats(&[1.0, 2.0], &[2]),
        floats(&[10.0, 20.0], &[2]),
        floats(&[4.0, -1.0], &[2]),
    ];
    let sum = graph("%0 = parameter 0 : f32[2]\n%1 = all_reduce %0 {ranks=3} : f32[2]\nreturn %1");
    assert_eq!(run(&sum, &arguments), vec![vec![15.0, 21.0]; 3]);
    let mean = graph("%0 = parameter 0 : f32[2]\n%1 = all_reduce %0 {ranks=3,mean=true} : f32[2]\nreturn %1");
    assert_eq!(run(&mean, &arguments), vec![vec![5.0, 7.0]; 3]);
}

#[test]
fn blocks_are_scattered_and_gathered_in_the_order_of_ranks() {
    let arguments = [
        floats(&[1.0, 2.0, 3.0, 4.0], &[4]),
        floats(&[10.0, 20.0, 30.0, 40.0], &[4]),
    ];
    let text = "%0 = parameter 0 : f32[4]\n%1 = reduce_scatter %0 {ranks=2} : f32[2]\n";
    let scattered = graph(&format!("{text}return %1"));
    assert_eq!(run(&scattered, &arguments), [[11.0, 22.0], [33.0, 44.0]]);
    let gathered = graph(&format!(
        "{text}%2 = all_gather %1 {{ranks=2}} : f32[4]\nreturn %2"
    ));
    assert_eq!(run(&gathered, &arguments), [[11.0, 22.0, 33.0, 44.0]; 2]);
}

#[test]
fn every_rank_gets_what_the_root_has() {
    let from =
        graph("%0 = parameter 0 : f32[1]\n%1 = broadcast_from %0 {ranks=3,root=2} : f32[1]\nreturn %1");
    let arguments = [1.0, 2.0, 3.0].map(|x| floats(&[x], &[1]));
    assert_eq!(run(&from, &arguments), [[3.0]; 3]);
}

#[test]
fn integers_wrap_and_sixteen_bits_round_once() {
    let ints = graph("%0 = parameter 0 : u8[1]\n%1 = all_reduce %0 {ranks=2} : u8[1]\nreturn %1");
    let of = |x| HostTensor::from_ints(DType::U8, [1], [x]);
    let none: &[Scalar] = &[];
    let (a, b) = ([of(200)], [of(100)]);
    let results = interpret_ranks(&ints, &[(&a, none), (&b, none)]).expect("it runs");
    assert_eq!(results[1][0].to_i64s(), [44]);
}

#[test]
fn a_started_collective_means_what_its_wait_gives() {
    let text = "%0 = parameter 0 : f32[2]\n%1 = all_reduce %0 {ranks=2,started=true} : f32[2]\n";
    let waited = graph(&format!("{text}%2 = collective_wait %1 : f32[2]\nreturn %2"));
    let arguments = [floats(&[1.0, 2.0], &[2]), floats(&[3.0, 4.0], &[2])];
    assert_eq!(run(&waited, &arguments), [[4.0, 6.0]; 2]);

    for (rest, detail) in [
        ("return %1", "0 readers and leaves as 1 outputs"),
        ("%2 = neg %1 : f32[2]\nreturn %2", "1 readers"),
        (
            "%2 = collective_wait %1 : f32[2]\n%3 = add %1, %2 : f32[2]\nreturn %3",
            "2 readers",
        ),
        (
            "%2 = collective_wait %0 : f32[2]\n%3 = collective_wait %1 : f32[2]\nreturn %2, %3",
            "no collective",
        ),
    ] {
        let parsed = Graph::parse(&format!("graph @broken {{\n{text}{rest}\n}}")).expect("it parses");
        let error = verify(&parsed).expect_err("nobody may read it early");
        assert_eq!(error.rule, Rule::StartedIsWaitedFor, "{error}");
        assert!(error.detail.contains(detail), "{error}");
    }
}

#[test]
fn what_does_not_work_in_place_is_kept_until_its_wait() {
    let text = "%0 = parameter 0 : f32[2]\n%1 = neg %0 : f32[2]\n\
                %2 = reduce_scatter %1 {ranks=2,started=true} : f32[1]\n";
    let waited = graph(&format!(
        "{text}%3 = collective_wait %2, %1 : f32[1]\n\
         %4 = all_gather %3 {{ranks=2,started=true}} : f32[2]\n\
         %5 = collective_wait %4, %3 : f32[2]\nreturn %5"
    ));
    let arguments = [floats(&[1.0, 2.0], &[2]), floats(&[3.0, 4.0], &[2])];
    assert_eq!(run(&waited, &arguments), [[-4.0, -6.0]; 2]);
    for operands in ["%2", "%2, %0"] {
        let rest = format!("%3 = collective_wait {operands} : f32[1]\nreturn %3");
        let parsed = Graph::parse(&format!("graph @broken {{\n{text}{rest}\n}}")).expect("it parses");
        let error = verify(&parsed).expect_err("the operand may be overwritten before the wait");
        assert_eq!(error.rule, Rule::StartedIsWaitedFor, "{error}");
        assert!(error.detail.contains("does not keep its operand"), "{error}");
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    for (text, reason) in [
        (
            "%0 = parameter 0 : f32[3]\n%1 = reduce_scatter %0 {ranks=2} : f32[1]",
            "do not divide among 2 ranks",
        ),
        (
            "%0 = parameter 0 : f32[]\n%1 = all_gather %0 {ranks=2} : f32[2]",
            "first dimension",
        ),
        (
            "%0 = parameter 0 : i32[2]\n%1 = all_reduce %0 {ranks=2,mean=true} : i32[2]",
            "means are of floats",
        ),
        (
            "%0 = parameter 0 : bool[2]\n%1 = all_reduce %0 {ranks=2} : bool[2]",
            "adds numbers",
        ),
        (
            "%0 = parameter 0 : f32[2]\n%1 = broadcast_from %0 {ranks=2,root=2} : f32[2]",
            "rank 2 of 2",
        ),
        (
            "%0 = parameter 0 : f32[2]\n%1 = all_reduce %0 {ranks=0} : f32[2]",
            "at least one rank",
        ),
    ] {
        let error = Graph::parse(&format!("graph @wrong {{\n{text}\nreturn %1\n}}")).expect_err(text);
        assert!(error.to_string().contains(reason), "{error}");
    }
}

#[test]
fn one_rank_alone_cannot_run_a_graph_of_two() {
    let sum = graph("%0 = parameter 0 : f32[2]\n%1 = all_reduce %0 {ranks=2} : f32[2]\nreturn %1");
    let error = interpret(&sum, &[floats(&[1.0, 2.0], &[2])], &[]).expect_err("there is no other rank");
    assert!(matches!(error, InterpretError::Ranks { given: 1, .. }), "{error}");
}
