//! The text form where random graphs do not reach: what a person writes, and what the parser says to
//! mistakes.

use kiln_graph::op::Op;
use kiln_graph::{DType, Graph, Phase, Provenance, Scalar, TensorType};

/// Wraps the lines in a graph with one parameter `%x : f32[2,3]`; the first of them is line 3.
fn graph(lines: &str) -> String {
    format!("graph @g {{\n  %x = parameter 0 : f32[2,3]\n{lines}\n}}\n")
}

#[test]
fn printing_is_stable() {
    let text = "\
graph @step {
  %0 = parameter 0 : f32[8,6]
  %1 = scalar 0 : f32[]
  %2 = broadcast %1 {dims=[]} : f32[8,6]                            ; fwd NumericFloat.MulScalar at main.rs:12 in model.head
  %3 = mul %0, %2 : f32[8,6]                                        ; bwd NumericFloat.MulScalar
  %4, %5 = top_k %3 {axis=1, k=3} : f32[8,3], i32[8,3]
  %6 = compare lt %0, %3 : bool[8,6]
  %7 = dot_general %0, %3 {a_contract=[1], b_contract=[1]} : f32[8,8]
  %8 = cast %0 : bf16[8,6]
  %9 = dot_general %8, %8 {a_contract=[1], b_contract=[1], result=f32} : f32[8,8]
  return %3 (alias 0), %5, %6, %7, %9
}
";
    let graph = Graph::parse(text).expect("well formed");
    assert_eq!(graph.to_string(), text);
    assert_eq!(
        graph
            .node(graph.value(graph.outputs[0].value).node)
            .provenance
            .phase,
        Phase::Backward
    );
}

#[test]
fn names_comments_and_defaults_are_free() {
    let written = Graph::parse(
        "# before\ngraph @g {\n\n %input = parameter 0 : f32[2,3]\t\r\n %out=exp %input:f32[2,3];opt # c\n return %out\n}\n# after",
    );
    let plain = "graph @g {\n %0 = parameter 0 : f32[2,3]\n %1 = exp %0 : f32[2,3] ; opt\n return %1\n}";
    assert_eq!(written, Graph::parse(plain));
    assert!(written.is_ok());
}

#[test]
fn odd_numbers_and_strings_come_back() {
    let mut graph = Graph::new("a \"name\" # with\n everything\u{7}\u{2028}é");
    let floats = [
        0.0,
        -0.0,
        0.1,
        1e300,
        5e-324,
        f64::INFINITY,
        f64::NEG_INFINITY,
        f64::NAN,
        -f64::NAN,
    ];
    let patterns = [0x7ff0_0000_0000_0001, 0xfff8_dead_beef_0000].map(f64::from_bits);
    let scalars = floats.into_iter().chain(patterns).map(Scalar::Float).chain([
        Scalar::Int(i64::MIN),
        Scalar::Int(0),
        Scalar::UInt(u64::MAX),
        Scalar::UInt(0),
        Scalar::Bool(true),
        Scalar::Bool(false),
    ]);
    for value in scalars {
        assert_eq!(value.to_string().parse::<Scalar>().ok(), Some(value), "{value}");
        for dtype in DType::ALL {
            // The value keeps its kind whatever dtype it is rounded to.
            let words = [
                "at",
                "in",
                "chunk",
                "gradient",
                "",
                "plain",
                "two words",
                "-",
                "#",
                "\\",
                "a\"b",
            ];
            let word = |offset: usize| Some(words[(graph.num_nodes() + offset) % words.len()].into());
            let provenance = Provenance {
                operation: word(0),
                phase: Phase::Unknown,
                gradient_of: word(3),
                location: word(1),
                module: word(2),
                chunk: graph
                    .num_nodes()
                    .is_multiple_of(3)
                    .then_some(graph.num_nodes() as u16),
                full_precision: graph.num_nodes().is_multiple_of(2),
            };
            let value = graph
                .add(Op::Constant { value, dtype }, &[], &provenance)
                .expect("well typed");
            graph.output(value, None);
        }
    }
    let text = graph.to_string();
    assert_eq!(Graph::parse(&text).as_ref(), Ok(&graph), "{text}");
    assert_eq!(
        graph.to_string().lines().count(),
        graph.num_nodes() + 3,
        "one line a node"
    );
}

#[test]
fn mistakes_are_located_and_explained() {
    #[rustfmt::skip]
    let cases = [
        ("  return %y", 3, 10, "%y is not defined above"),
        ("  %1 = exp %x : f32[2,3] ; fwd chunk two\n  return", 3, 32, "expected the number of a chunk, not `two`"),
        ("  %x = exp %x : f32[2,3]\n  return", 3, 3, "%x is defined twice"),
        ("  %1 = expp %x : f32[2,3]\n  return", 3, 8, "unknown operation `expp`"),
        ("  %1 = exp %x : f32[3,2]\n  return", 3, 8, "the result types are [f32[2,3]], not [f32[3,2]]"),
        ("  %1 = exp %x : f33[2,3]\n  return", 3, 17, "unknown element type `f33`"),
        ("  %1 = exp %x, %x : f32[2,3]\n  return", 3, 8, "`exp`: takes 1 operands, got 2"),
        ("  %1, %2 = exp %x : f32[2,3]\n  return", 3, 12, "`exp` has 1 results, 2 are named"),
        ("  %1 = exp %x {axis=1} : f32[2,3]\n  return", 3, 16, "unknown or repeated attribute `axis`"),
        ("  %1 = reduce sum %x : f32[2]\n  return", 3, 8, "attribute `axes` is missing"),
        ("  %1 = reduce sum %x {axes=1} : f32[2]\n  return", 3, 23, "axes: expected a list of non-negative integers"),
        ("  %1 = reduce plus %x {axes=[1]} : f32[2]\n  return", 3, 15, "op: expected a reduction"),
        ("  %1 = reduce %x {axes=[1]} : f32[2]\n  return", 3, 8, "expected a reduction (op) after the operation"),
        ("  %1 = reduce sum sum %x {axes=[1]} : f32[2]\n  return", 3, 19, "takes no such word"),
        ("  %1 = reduce sum %x {axes=[1],axes=[1]} : f32[2]\n  return", 3, 32, "unknown or repeated attribute `axes`"),
        ("  %1 = cast %x\n  return", 3, 8, "the result type is missing"),
        ("  %1 = sort %x {axis=0} : f32[2,3]\n  return", 3, 8, "the second result type is missing"),
        ("  %1 = exp %x : f32[2,3] ; hello\n  return", 3, 28, "comments start with `#`"),
        ("  %1 = exp %x : f32[2,3] ; fwd a b\n  return", 3, 34, "given twice"),
        ("  %1 = exp %x : f32[2,3] %x\n  return", 3, 26, "expected the end of the line"),
        ("  return %x (alias x)", 3, 20, "`x` is not the number of a parameter"),
        ("  %1 = parameter 2 : f32[2]\n  return", 3, 8, "expected parameter 1, the next one"),
        ("  %1 = exp %x : f32[9999999999999,9999999999999]\n  return", 3, 17, "larger than any memory"),
        ("", 4, 1, "expected `return` before the end of the graph"),
        ("  return\n  return", 4, 3, "expected `}`"),
        ("  return\n}\n}", 5, 1, "expected nothing after the graph"),
        ("  %1 = extern \"a\\qb\" {attributes=\"\"} : f32[2]\n  return", 3, 17, "unknown escape"),
        ("  %1 = extern \"ab\n  return", 3, 16, "does not end on its line"),
    ];
    for (lines, line, column, message) in cases {
        let error = Graph::parse(&graph(lines)).expect_err(lines);
        assert_eq!((error.line, error.column), (line, column), "{lines}: {error}");
        assert!(error.message.contains(message), "{lines}: {error}");
    }
    for text in [
        "",
        "graph",
        "graph @g",
        "graph @g {",
        "grph @g {",
        "graph @g {\n  %0 = parameter 0 : f32[2]",
    ] {
        assert!(Graph::parse(text).is_err(), "{text}");
    }
}

/// Attributes near the ends of their range break rules, not the parser.
#[test]
fn huge_attributes_are_refused() {
    let max = u64::MAX;
    let (big, small) = (i64::MAX, i64::MIN);
    let lines = [
        format!("  %1 = slice %x {{starts=[0,0], limits=[{max},3], steps=[1,1]}} : f32[2,3]"),
        format!("  %1 = update_slice %x, %x {{starts=[{max},0], steps=[{max},1]}} : f32[2,3]"),
        format!(
            "  %c = constant 0.0 : f32[]\n  %1 = pad %x, %c {{low=[{big},0], high=[{big},0]}} : f32[2,3]"
        ),
        format!(
            "  %c = constant 0.0 : f32[]\n  %1 = pad %x, %c {{low=[{small},0], high=[{small},0]}} : f32[2,3]"
        ),
        format!("  %1 = concat %x {{axis={max}}} : f32[2,3]"),
        format!("  %1 = iota {{axis={max}}} : f32[2,3]"),
        format!("  %1 = transpose %x {{perm=[{max},0]}} : f32[2,3]"),
        format!(
            "  %r = reshape %x : f32[1,2,3]\n  %1 = conv %r, %r {{stride=[{max}], pad_low=[{max}], pad_high=[{max}], dilation=[{max}], groups={max}}} : f32[2]"
        ),
        format!(
            "  %r = reshape %x : f32[1,2,3]\n  %1 = conv_input_grad %r, %r {{stride=[1], pad_low=[1], pad_high=[1], dilation=[1], groups={max}, input=[{max}]}} : f32[2]"
        ),
        format!(
            "  %r = reshape %x : f32[1,2,3]\n  %1 = max_pool %r {{size=[{max}], stride=[{max}], pad_low=[{max}], pad_high=[1], dilation=[{max}], ceil_mode=true}} : f32[2]"
        ),
        format!(
            "  %r = reshape %x : f32[1,2,3]\n  %1 = avg_pool %r {{size=[2], stride=[{max}], pad_low=[0], pad_high=[{max}], dilation=[1]}} : f32[2]"
        ),
    ];
    for line in lines {
        assert!(
            Graph::parse(&graph(&format!("{line}\n  return"))).is_err(),
            "{line}"
        );
    }
}

#[test]
fn types_too_large_for_memory_are_no_types() {
    let fits = |shape: &[usize]| TensorType::new(DType::F32, shape).fits_memory();
    assert!(fits(&[]) && fits(&[0]) && fits(&[1 << 30, 1 << 30]));
    assert!(!fits(&[1 << 40, 1 << 40]) && !fits(&[0, 1 << 40, 1 << 40]) && !fits(&[usize::MAX]));
}
