//! Operations that are kernels of their own, on the host against the interpreter, and as machine code.

mod common;
mod emitted;

use emitted::{Emitted, check, check_special, graph, machine_code};
use kiln_cuda::testing::host::{Differential, Outcome};
use kiln_graph::DType;
use kiln_graph::testing::{Family, GraphConfig, random_graph};

const FLOATS: [&str; 4] = ["f32", "f64", "f16", "bf16"];
const INTEGERS: [&str; 8] = ["i64", "i32", "i16", "i8", "u64", "u32", "u16", "u8"];

fn of_types(types: &[&str], text: &str) -> Vec<String> {
    types
        .iter()
        .map(|dtype| text.replace("T[", &format!("{dtype}[")))
        .collect()
}

fn of_all(types: &[&str], texts: &[&str]) -> Vec<String> {
    texts.iter().flat_map(|text| of_types(types, text)).collect()
}

/// Compares, and compiles the kernels for GPUs.
fn check_all(cases: &[String]) {
    check(cases);
    machine_code(&Emitted::new(&graph(cases)).functions);
}

fn check_all_special(cases: &[String]) {
    check_special(cases);
    machine_code(&Emitted::new(&graph(cases)).functions);
}

/// One type for each size of an element.
const SIZES: [&str; 5] = ["f32", "f64", "bf16", "i8", "bool"];

#[test]
fn padding() {
    let texts = [
        "$x = parameter : T[3,5]
        $v = parameter : T[]
        $y = pad $x, $v {low=[1,2], high=[0,3]} : T[4,10]
        return $y",
        // Whole rows, in words of sixteen bytes.
        "$x = parameter : T[3,2,32]
        $v = parameter : T[]
        $y = pad $x, $v {low=[1,0,0], high=[2,1,0]} : T[6,3,32]
        return $y",
        // Cropped on one side, and padded by words on the other.
        "$x = parameter : T[4,48]
        $v = parameter : T[]
        $y = pad $x, $v {low=[-1,16], high=[2,-32]} : T[5,32]
        return $y",
        "$x = parameter : T[]
        $v = parameter : T[]
        $y = pad $x, $v {low=[], high=[]} : T[]
        return $y",
    ];
    check_all(&of_all(&SIZES, &texts));
}

#[test]
fn replaced_slices() {
    let texts = [
        "$x = parameter : T[4,6,5]
        $u = parameter : T[2,3,2]
        $y = update_slice $x, $u {starts=[1,0,2], steps=[2,2,1]} : T[4,6,5]
        return $y",
        "$x = parameter : T[4,3,32]
        $u = parameter : T[2,3,32]
        $y = update_slice $x, $u {starts=[1,0,0], steps=[1,1,1]} : T[4,3,32]
        return $y",
        "$x = parameter : T[6,64]
        $u = parameter : T[3,32]
        $y = update_slice $x, $u {starts=[1,16], steps=[2,1]} : T[6,64]
        return $y",
        "$x = parameter : T[7]
        $u = parameter : T[1]
        $y = update_slice $x, $u {starts=[6], steps=[3]} : T[7]
        return $y",
    ];
    check_all(&of_all(&SIZES, &texts));
}

#[test]
fn empty_tensors() {
    let texts = [
        "$x = parameter : T[3,0]
        $a = reduce sum $x {axes=[1]} : T[3]
        $b = reduce max $x {axes=[1]} : T[3]
        $c = reduce min $x {axes=[1]} : T[3]
        $d = reduce prod $x {axes=[0]} : T[0]
        $e = reduce prod $x {axes=[0,1]} : T[]
        return $a, $b, $c, $d, $e",
        "$x = parameter : T[0,4]
        $v = parameter : T[]
        $y = pad $x, $v {low=[2,0], high=[1,0]} : T[3,4]
        return $y",
        "$x = parameter : T[2,0,3]
        $z = parameter : T[2,5,3]
        $w = parameter : T[2,1,3]
        $y = concat $x, $z, $x, $w {axis=1} : T[2,6,3]
        return $y",
        "$x = parameter : T[33]
        $u = parameter : T[0]
        $i = parameter : i32[0]
        $a = update_slice $x, $u {starts=[4], steps=[1]} : T[33]
        $b = scatter add $x, $i, $u {axis=0} : T[33]
        $c = index_put assign $x, $i, $u {axis=0} : T[33]
        $n = exp $u : T[0]
        return $a, $b, $c, $n",
        "$x = parameter : T[0,5]
        $a = cumulative sum $x {axis=1} : T[0,5]
        $i = arg_reduce max $x {axis=1} : i64[0]
        $v, $p = sort $x {axis=0} : T[0,5], i32[0,5]
        return $a, $i, $v, $p",
    ];
    check_all(&of_all(&["f32", "f64", "bf16"], &texts));
    check_all(&of_all(&["i32", "u8", "i64"], &texts[..3]));
    let windows = [
        "$x = parameter : T[2,0,5,5]
        $w = parameter : T[3,0,3,3]
        $y = conv $x, $w {stride=[1,1], pad_low=[0,0], pad_high=[0,0], dilation=[1,1], groups=1} : T[2,3,3,3]
        return $y",
        "$x = parameter : T[0,2,5]
        $g = parameter : T[0,3,3]
        $y = conv_weight_grad $x, $g {stride=[1], pad_low=[0], pad_high=[0], dilation=[1], groups=1, kernel=[3]} : T[3,2,3]
        return $y",
        "$x = parameter : T[2,3,0]
        $a, $i = max_pool_with_indices $x {size=[2], stride=[1], pad_low=[1], pad_high=[1], dilation=[1]} : T[2,3,1], i32[2,3,1]
        $b = avg_pool $x {size=[2], stride=[1], pad_low=[1], pad_high=[1], dilation=[1], count_include_pad=true} : T[2,3,1]
        return $a, $i, $b",
    ];
    check_all(&of_all(&["f32", "f16"], &windows));
}

#[test]
fn indices_of_all_types() {
    // Signed ones come from what is known to be in range; that of others is looked at in the step.
    let cases = ["i64", "i32", "i16", "u64", "u32", "u16"].map(|ty| {
        let indices = match ty.starts_with('u') {
            true => format!("$i = parameter : {ty}[40]"),
            false => format!("$b = parameter : u8[40]\n$i = cast $b : {ty}[40]"),
        };
        format!(
            "$x = parameter : f32[300,3]
            {indices}
            $u = parameter : f32[40,3]
            $y = index_put add $x, $i, $u {{axis=0}} : f32[300,3]
            $j = slice $i {{starts=[0], limits=[10], steps=[1]}} : {ty}[10]
            $v = slice $u {{starts=[0,0], limits=[10,3], steps=[1,1]}} : f32[10,3]
            $z = index_put assign $x, $j, $v {{axis=0}} : f32[300,3]
            return $y, $z"
        )
    });
    check_special(&cases);
    machine_code(&Emitted::new(&graph(&cases)).functions);
}

#[test]
fn tensors_of_more_than_32_bits_are_machine_code() {
    let cases = [
        "$x = parameter : i8[70000,40000]
        $v = parameter : i8[]
        $y = pad $x, $v {low=[1,1], high=[0,0]} : i8[70001,40001]
        $z = update_slice $y, $x {starts=[1,0], steps=[1,1]} : i8[70001,40001]
        return $z",
        "$x = parameter : bf16[70000,40000]
        $i = parameter : i32[100000]
        $u = parameter : bf16[100000,40000]
        $y = index_put add $x, $i, $u {axis=0} : bf16[70000,40000]
        $j = parameter : i64[50,40000]
        $w = parameter : bf16[50,40000]
        $z = scatter max $y, $j, $w {axis=0} : bf16[70000,40000]
        return $z",
        "$x = parameter : f16[70000,40000]
        $a = arg_reduce max $x {axis=1} : i64[70000]
        $b = cumulative sum $x {axis=1} : f16[70000,40000]
        $c = cumulative max $x {axis=0} : f16[70000,40000]
        $v, $i = sort $x {axis=0} : f16[70000,40000], i64[70000,40000]
        $w, $j = top_k $x {axis=1, k=50} : f16[70000,50], i64[70000,50]
        return $a, $b, $c, $v, $i, $w, $j",
    ];
    machine_code(&Emitted::new(&graph(&cases.map(str::to_owned))).functions);
}

#[test]
fn positions_of_extremes() {
    let texts = [
        "$x = parameter : T[3,300]
        $a = arg_reduce max $x {axis=1} : i64[3]
        $b = arg_reduce min $x {axis=1} : i32[3]
        return $a, $b",
        "$x = parameter : T[5,9,70]
        $a = arg_reduce max $x {axis=1} : i32[5,70]
        $b = arg_reduce min $x {axis=0} : u8[9,70]
        $c = arg_reduce max $x {axis=2} : i64[5,9]
        return $a, $b, $c",
        "$x = parameter : T[1,3]
        $a = arg_reduce min $x {axis=0} : i32[3]
        return $a",
        // Words of sixteen bytes.
        "$x = parameter : T[3,1056]
        $a = arg_reduce max $x {axis=1} : i64[3]
        return $a",
    ];
    check_all_special(&of_all(&FLOATS, &texts));
    check_all_special(&of_all(&INTEGERS, &texts[..2]));
    check_all_special(&of_all(&["i8", "u64"], &texts[3..]));
}

#[test]
fn positions_of_extremes_of_long_lines() {
    let texts = [
        "$x = parameter : T[2,20000]
        $a = arg_reduce max $x {axis=1} : i64[2]
        return $a",
        "$x = parameter : T[17000,3]
        $a = arg_reduce min $x {axis=0} : i64[3]
        return $a",
    ];
    check_all(&of_all(&["f32", "i64"], &texts));
    check_all_special(&of_all(&["f32"], &texts));
}

/// Running sums, products, largest and smallest elements of `shape` along `axis`.
fn running(shape: &str, axis: usize, modes: &[&str]) -> String {
    let mut text = format!("$x = parameter : T[{shape}]\n");
    for mode in modes {
        text += &format!("$y{mode} = cumulative {mode} $x {{axis={axis}}} : T[{shape}]\n");
    }
    let outputs: Vec<String> = modes.iter().map(|mode| format!("$y{mode}")).collect();
    text + &format!("return {}", outputs.join(", "))
}

#[test]
fn running_reductions() {
    let all = ["sum", "prod", "max", "min"];
    // A thread for each line; lanes of a warp; a block; neighbouring lines.
    let texts = [
        running("7,20", 1, &all),
        running("5,200", 1, &all),
        running("2,1100", 1, &all),
        running("3,130,40", 1, &all),
        running("4,5,6", 0, &all),
        running("70,3", 0, &all),
    ];
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    check_all(&of_all(&["i32"], &texts));
    check_all(&of_all(
        &["i64", "i8", "i16", "u64", "u32", "u16", "u8"],
        &texts[1..2],
    ));
    let sums = [
        running("7,20", 1, &["sum", "max", "min"]),
        running("5,200", 1, &["sum", "max", "min"]),
        running("3,130,40", 1, &["sum", "max", "min"]),
        running("3,7", 1, &["prod"]),
    ];
    let sums: Vec<&str> = sums.iter().map(String::as_str).collect();
    check_all(&of_all(&FLOATS, &sums));
    let extremes = running("5,200", 1, &["max", "min"]);
    check_all_special(&of_types(&FLOATS, &extremes));
}

#[test]
fn running_reductions_of_long_lines() {
    let texts = [
        running("2,20000", 1, &["sum", "max", "prod"]),
        running("1000,32", 0, &["sum", "min"]),
    ];
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    check_all(&of_all(&["i32", "f32", "f64"], &texts));
}

fn sorted(shape: &str, axis: usize) -> String {
    format!(
        "$x = parameter : T[{shape}]
        $a, $i = sort $x {{axis={axis}}} : T[{shape}], i32[{shape}]
        $b, $j = sort $x {{axis={axis}, descending=true}} : T[{shape}], i64[{shape}]
        return $a, $i, $b, $j"
    )
}

#[test]
fn sorting() {
    let texts = [
        sorted("5,37", 1),
        sorted("3,40,6", 1),
        sorted("9,1", 1),
        sorted("1300", 0),
    ];
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    check_all_special(&of_all(&FLOATS, &texts[..2]));
    check_all_special(&of_all(&["f32", "f64"], &texts[2..]));
    check_all_special(&of_all(&INTEGERS, &texts[..1]));
    check_all_special(&of_types(&["bool"], texts[1]));
}

#[test]
fn sorting_long_lines() {
    check_all_special(&of_types(&["f32"], &sorted("2,9000", 1)));
    check_all_special(&of_types(&["i64"], &sorted("2100,2", 0)));
}

#[test]
fn the_first_few() {
    let texts = [
        "$x = parameter : T[4,50]
        $v, $i = top_k $x {axis=1, k=3} : T[4,3], i64[4,3]
        $w, $j = top_k $x {axis=1, k=50} : T[4,50], i32[4,50]
        return $v, $i, $w, $j",
        "$x = parameter : T[30,2,5]
        $v, $i = top_k $x {axis=0, k=1} : T[1,2,5], i32[1,2,5]
        return $v, $i",
    ];
    check_all_special(&of_all(&FLOATS, &texts));
    check_all_special(&of_all(&["i32", "u64", "i8"], &texts));
    // Lists of candidates that get shorter twice, and a list of which most is wanted.
    let long = [
        "$x = parameter : T[2,9000]
        $v, $i = top_k $x {axis=1, k=1000} : T[2,1000], i64[2,1000]
        return $v, $i",
        "$x = parameter : T[1,5000]
        $v, $i = top_k $x {axis=1, k=2000} : T[1,2000], i64[1,2000]
        return $v, $i",
        "$x = parameter : T[2500,3]
        $v, $i = top_k $x {axis=0, k=7} : T[7,3], i64[7,3]
        return $v, $i",
    ];
    check_all_special(&of_all(&["f32"], &long));
    check_all_special(&of_types(&["f64"], long[2]));
}

const MODES: [&str; 5] = ["assign", "add", "mul", "max", "min"];

/// Scatters in all modes; indices are `u8` into 256 places, so that all are in range.
fn in_all_modes(case: &str, result: &str) -> String {
    let (head, last) = case.rsplit_once('\n').unwrap();
    let mut text = format!("{head}\n");
    for mode in MODES {
        text += &format!("$y{mode} = {} : {result}\n", last.trim().replace("MODE", mode));
    }
    text + "return $yassign, $yadd, $ymul, $ymax, $ymin"
}

fn index_put(outer: usize, inner: usize, count: usize, places: usize) -> String {
    let case = format!(
        "$x = parameter : T[{outer},{places},{inner}]
        $i = parameter : u8[{count}]
        $u = parameter : T[{outer},{count},{inner}]
        index_put MODE $x, $i, $u {{axis=1}}"
    );
    in_all_modes(&case, &format!("T[{outer},{places},{inner}]"))
}

#[test]
fn slices_are_put_where_indices_say() {
    // Few indices, looked through; many, sorted; slices in words and not; most updates at one place.
    let texts = [
        index_put(2, 3, 7, 256),
        index_put(1, 16, 30, 256),
        index_put(1, 64, 600, 256),
        index_put(2, 3, 600, 256),
    ];
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    check_all(&of_all(&["i32"], &texts));
    check_all(&of_all(&["i64", "i16", "u8", "bool"], &texts[..1]));
    let sums = texts.iter().map(|text| {
        let (head, _) = text.split_once("$ymul").unwrap();
        format!("{head}return $yassign, $yadd")
    });
    let sums: Vec<String> = sums.collect();
    let sums: Vec<&str> = sums.iter().map(String::as_str).collect();
    check_all(&of_all(&FLOATS, &sums));
}

#[test]
fn the_gradient_of_an_embedding() {
    // It begins with zeros that are never stored. Indices are few different ones: whole chunks go to one
    // place.
    let case = "$z = constant 0 : T[]
        $x = broadcast $z {dims=[]} : T[256,24]
        $i = parameter : u8[5000]
        $u = parameter : T[5000,24]
        $y = index_put add $x, $i, $u {axis=0} : T[256,24]
        return $y";
    check_all(&of_types(&["f32", "bf16", "i32"], case));
    check_special(&of_types(&["i32"], case));
}

#[test]
fn elements_are_scattered_where_indices_say() {
    let few = "$x = parameter : T[5,256,3]
        $i = parameter : u8[4,6,2]
        $u = parameter : T[4,6,2]
        scatter MODE $x, $i, $u {axis=1}";
    let many = "$x = parameter : T[256,3,2]
        $i = parameter : u8[700,2,2]
        $u = parameter : T[700,2,2]
        scatter MODE $x, $i, $u {axis=0}";
    let lines = "$x = parameter : T[9,256]
        $i = parameter : u8[9,2]
        $u = parameter : T[9,2]
        scatter MODE $x, $i, $u {axis=1}";
    let texts = [
        in_all_modes(few, "T[5,256,3]"),
        in_all_modes(many, "T[256,3,2]"),
        in_all_modes(lines, "T[9,256]"),
    ];
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    check_all(&of_all(&["i32"], &texts));
    check_all(&of_types(&["i8", "u64", "bool"], texts[0]));
    let sums = texts.iter().map(|text| {
        let (head, _) = text.split_once("$ymul").unwrap();
        format!("{head}return $yassign, $yadd")
    });
    let sums: Vec<String> = sums.collect();
    let sums: Vec<&str> = sums.iter().map(String::as_str).collect();
    check_all(&of_all(&FLOATS, &sums));
}

/// Long lists, fewer than the lines of the result: most updates of a list go to a few places.
#[test]
fn long_lists_narrower_than_the_result() {
    let one = "$x = parameter : T[9,256]
        $i = parameter : u8[1,700]
        $u = parameter : T[1,700]
        scatter MODE $x, $i, $u {axis=1}";
    let few = "$x = parameter : T[20,256]
        $i = parameter : u8[3,700]
        $u = parameter : T[3,700]
        scatter MODE $x, $i, $u {axis=1}";
    let between = "$x = parameter : T[5,256,4]
        $i = parameter : u8[2,700,3]
        $u = parameter : T[2,700,3]
        scatter MODE $x, $i, $u {axis=1}";
    let texts = [
        in_all_modes(one, "T[9,256]"),
        in_all_modes(few, "T[20,256]"),
        in_all_modes(between, "T[5,256,4]"),
    ];
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    check_all_special(&of_all(&["i32"], &texts));
    let sums = texts.iter().map(|text| {
        let (head, _) = text.split_once("$ymul").unwrap();
        format!("{head}return $yassign, $yadd")
    });
    let sums: Vec<String> = sums.collect();
    let sums: Vec<&str> = sums.iter().map(String::as_str).collect();
    check_all(&of_all(&["f32", "bf16"], &sums));
}

/// Chunks are joined once a list, however many lines the result has: 2048 of the one list here.
#[test]
fn chunks_are_counted_by_the_list() {
    for (rows, places) in [(65536, 64), (1_100_000, 8)] {
        let case = format!(
            "$x = parameter : f32[{rows},{places}]
            $i = parameter : i32[1,65536]
            $u = parameter : f32[1,65536]
            $y = scatter add $x, $i, $u {{axis=1}} : f32[{rows},{places}]
            return $y"
        );
        let emitted = Emitted::new(&graph(&[case]));
        let joins = emitted.functions.iter().filter(|function| {
            let writes = |parameter: &String| parameter.starts_with("float*") && parameter.ends_with("parts");
            function.parameters.iter().any(writes)
        });
        let joins: Vec<_> = joins.collect();
        assert_eq!(joins.len(), 1);
        assert!(
            joins[0].body.contains("constexpr int COUNT = 2048;"),
            "{}",
            joins[0].body
        );
        // The sorted list, where each place's updates begin, and the two lists of the sort, whose memory the
        // parts take afterwards.
        let list = 65536 * 8;
        assert_eq!(
            emitted.scratch,
            [list + (4 * (places + 1_usize)).next_multiple_of(256) + 2 * list]
        );
        machine_code(&emitted.functions);
    }
}

#[test]
fn many_random_graphs() {
    let mut config = GraphConfig {
        families: vec![
            Family::Reduce,
            Family::Movement,
            Family::Index,
            Family::Dot,
            Family::Sort,
        ],
        floats: vec![DType::F32, DType::F64, DType::F16, DType::BF16],
        ints: DType::ALL.into_iter().filter(|dtype| dtype.is_int()).collect(),
        ..GraphConfig::default()
    };
    for seed in 0..20 {
        config.max_elements = if seed % 4 == 0 { 6000 } else { 120 };
        let random = random_graph(4000 + seed, &config);
        let outcome = Differential::new(&random.graph)
            .tolerances(&random.tolerances)
            .check();
        assert_eq!(outcome, Ok(Outcome::Same), "seed {seed}\n{}", random.graph);
    }
}
