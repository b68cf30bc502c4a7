//! Products of matrices as the target emits them, through cuBLASLt and by its own kernels, against the
//! interpreter.

mod common;
mod emitted;

use emitted::{Emitted, check, graph, machine_code};
use kiln_cuda::code::CallKind;
use kiln_cuda::emit::Call;
use kiln_cuda::emit::product::padded::Padding;
use kiln_cuda::testing::host::{Differential, Outcome};

const PLAIN: &str = "$a = parameter : T[5,7]
    $b = parameter : T[7,3]
    $c = dot_general $a, $b {a_contract=[1], b_contract=[0]} : T[5,3]
    return $c";
const TRANSPOSED: &str = "$a = parameter : T[7,5]
    $b = parameter : T[3,7]
    $c = dot_general $a, $b {a_contract=[0], b_contract=[1]} : T[5,3]
    return $c";
const BATCH: &str = "$a = parameter : T[2,3,5,7]
    $b = parameter : T[2,3,7,4]
    $c = dot_general $a, $b {a_batch=[0,1], b_batch=[0,1], a_contract=[3], b_contract=[2]} : T[2,3,5,4]
    return $c";
/// Scores of heads that are parts of one projection: a batch of two dimensions that do not join.
const HEADS: &str = "$x = parameter : T[2,5,24]
    $q0 = slice $x {starts=[0,0,0], limits=[2,5,8], steps=[1,1,1]} : T[2,5,8]
    $q1 = reshape $q0 : T[2,5,2,4]
    $q = transpose $q1 {perm=[0,2,1,3]} : T[2,2,5,4]
    $k0 = slice $x {starts=[0,0,8], limits=[2,5,16], steps=[1,1,1]} : T[2,5,8]
    $k1 = reshape $k0 : T[2,5,2,4]
    $k = transpose $k1 {perm=[0,2,1,3]} : T[2,2,5,4]
    $s = dot_general $q, $k {a_batch=[0,1], b_batch=[0,1], a_contract=[3], b_contract=[3]} : T[2,2,5,5]
    return $s";
/// Heads that share keys.
const REPEATED: &str = "$q = parameter : T[2,4,5,3]
    $k0 = parameter : T[2,1,6,3]
    $k = broadcast $k0 {dims=[0,1,2,3]} : T[2,4,6,3]
    $s = dot_general $q, $k {a_batch=[0,1], b_batch=[0,1], a_contract=[3], b_contract=[3]} : T[2,4,5,6]
    return $s";
/// Rows of two dimensions, around the contracted one.
const SPLIT_ROWS: &str = "$a = parameter : T[4,7,3]
    $b = parameter : T[7,6]
    $c = dot_general $a, $b {a_contract=[1], b_contract=[0]} : T[4,3,6]
    return $c";
const TWO_DEPTHS: &str = "$a = parameter : T[3,4,5]
    $b = parameter : T[5,6,3]
    $c = dot_general $a, $b {a_contract=[0,2], b_contract=[2,0]} : T[4,6]
    return $c";
const VECTORS: &str = "$a = parameter : T[70]
    $b = parameter : T[70,5]
    $c = parameter : T[5,70]
    $d = parameter : T[70]
    $x = dot_general $a, $b {a_contract=[0], b_contract=[0]} : T[5]
    $y = dot_general $c, $a {a_contract=[1], b_contract=[0]} : T[5]
    $z = dot_general $a, $d {a_contract=[0], b_contract=[0]} : T[]
    $w = dot_general $a, $d {} : T[70,70]
    return $x, $y, $z, $w";
const SINGLE_NUMBERS: &str = "$a = parameter : T[40,70]
    $b = parameter : T[40,70]
    $c = parameter : T[40,5]
    $d = parameter : T[5,40]
    $x = dot_general $a, $b {a_batch=[0], b_batch=[0], a_contract=[1], b_contract=[1]} : T[40]
    $y = dot_general $c, $d {a_batch=[0], b_batch=[1], a_contract=[1], b_contract=[0]} : T[40]
    return $x, $y";
const NOTHING: &str = "$a = parameter : T[5,0]
    $b = parameter : T[0,3]
    $c = dot_general $a, $b {a_contract=[1], b_contract=[0]} : T[5,3]
    $d = dot_general $b, $b {a_contract=[1], b_contract=[1]} : T[0,0]
    return $c, $d";
const ONES: &str = "$a = parameter : T[1,1]
    $b = parameter : T[1,1]
    $c = dot_general $a, $b {a_contract=[1], b_contract=[0]} : T[1,1]
    return $c";
/// Windows that no matrix has: backwards, rows that repeat, elements that are apart in both directions.
const WINDOWS: &str = "$a = parameter : T[20,33]
    $b = parameter : T[33,19]
    $r = flip $a {axes=[1]} : T[20,33]
    $x = dot_general $r, $b {a_contract=[1], b_contract=[0]} : T[20,19]
    $v = parameter : T[33]
    $rows = broadcast $v {dims=[1]} : T[9,33]
    $y = dot_general $rows, $b {a_contract=[1], b_contract=[0]} : T[9,19]
    $wide = parameter : T[40,66]
    $apart = slice $wide {starts=[1,1], limits=[40,66], steps=[2,2]} : T[20,33]
    $z = dot_general $apart, $b {a_contract=[1], b_contract=[0]} : T[20,19]
    return $x, $y, $z";
/// Enough tiles that they are of the largest kind.
const MANY_TILES: &str = "$a = parameter : T[70,65,17]
    $b0 = parameter : T[70,17,66]
    $b = flip $b0 {axes=[1]} : T[70,17,66]
    $c = dot_general $a, $b {a_batch=[0], b_batch=[0], a_contract=[2], b_contract=[1]} : T[70,65,66]
    return $c";
/// The heads of attention, joined before the next product: the first one stores them in the order that the
/// second one reads.
const JOINED_HEADS: &str = "$p = parameter : T[2,3,5,6]
    $v = parameter : T[2,3,6,4]
    $w = parameter : T[12,7]
    $h = dot_general $p, $v {a_batch=[0,1], b_batch=[0,1], a_contract=[3], b_contract=[2]} : T[2,3,5,4]
    $t = transpose $h {perm=[0,2,1,3]} : T[2,5,3,4]
    $r = reshape $t : T[10,12]
    $y = dot_general $r, $w {a_contract=[1], b_contract=[0]} : T[10,7]
    return $y";

const ALL: &[&str] = &[
    PLAIN,
    TRANSPOSED,
    BATCH,
    HEADS,
    REPEATED,
    SPLIT_ROWS,
    TWO_DEPTHS,
    VECTORS,
    SINGLE_NUMBERS,
    NOTHING,
    ONES,
    WINDOWS,
    JOINED_HEADS,
];

/// The cases for elements of type `dtype`.
fn cases(all: &[&str], dtype: &str) -> Vec<String> {
    all.iter()
        .map(|text| text.replace("T[", &format!("{dtype}[")))
        .collect()
}

/// Scores of heads of three numbers, whose keys begin anywhere.
const SMALL_HEADS: &str = "$x = parameter : bf16[2,5,18]
    $q0 = slice $x {starts=[0,0,0], limits=[2,5,6], steps=[1,1,1]} : bf16[2,5,6]
    $q1 = reshape $q0 : bf16[2,5,2,3]
    $q = transpose $q1 {perm=[0,2,1,3]} : bf16[2,2,5,3]
    $k0 = slice $x {starts=[0,0,6], limits=[2,5,12], steps=[1,1,1]} : bf16[2,5,6]
    $k1 = reshape $k0 : bf16[2,5,2,3]
    $k = transpose $k1 {perm=[0,2,1,3]} : bf16[2,2,5,3]
    $s = dot_general $q, $k {a_batch=[0,1], b_batch=[0,1], a_contract=[3], b_contract=[3]} : bf16[2,2,5,5]
    return $s";

/// The library chooses algorithms for addresses as they are.
#[test]
fn products_say_what_their_addresses_are_multiples_of() {
    let graph = graph(&[SMALL_HEADS.into()]);
    let code = Differential::new(&graph).compile().unwrap().code;
    let mut least = u32::MAX;
    for call in &code.calls {
        let CallKind::Product {
            product,
            left,
            right,
            result,
            ..
        } = &call.kind
        else {
            continue;
        };
        for (address, alignment) in [left, right, result].into_iter().zip(product.alignments) {
            let bytes = address.bytes();
            assert!(
                bytes.is_multiple_of(alignment as usize),
                "{address:?}: {alignment}"
            );
            assert!(
                alignment == 256 || !bytes.is_multiple_of(2 * alignment as usize),
                "{address:?}: {alignment}"
            );
            least = least.min(alignment);
        }
    }
    assert_eq!(least, 4);
}

#[test]
fn products_of_floats() {
    for dtype in ["f32", "bf16", "f16", "f64"] {
        check(&cases(ALL, dtype));
    }
}

#[test]
fn products_of_integers() {
    for dtype in ["i32", "u8", "i64"] {
        check(&cases(ALL, dtype));
    }
    for dtype in ["i16", "i8", "u64", "u32", "u16"] {
        check(&cases(&[PLAIN, TWO_DEPTHS], dtype));
    }
}

#[test]
fn large_tiles() {
    check(&cases(&[MANY_TILES], "f32"));
}

#[test]
fn every_kernel_is_machine_code() {
    let mut kernels = Vec::new();
    for dtype in ["f32", "f64", "f16", "bf16"] {
        let mut all = cases(ALL, dtype);
        all.extend(cases(&[MANY_TILES], dtype));
        kernels.extend(Emitted::new(&graph(&all)).functions);
    }
    for dtype in ["i64", "i32", "i16", "i8", "u64", "u32", "u16", "u8"] {
        kernels.extend(Emitted::new(&graph(&cases(ALL, dtype))).functions);
    }
    // Positions of more than 32 bits.
    let large = "$a = parameter : T[70000,40000]
        $b = parameter : T[40000,9]
        $c = dot_general $a, $b {a_contract=[1], b_contract=[0]} : T[70000,9]
        return $c";
    kernels.extend(Emitted::new(&graph(&cases(&[large], "i32"))).functions);
    machine_code(&kernels);
}

/// The products that a case becomes in the library, as text; a dash for each launch of our own.
fn products(case: &str) -> Vec<String> {
    let calls = Emitted::new(&graph(&cases(&[case], "bf16"))).calls;
    let text = calls.iter().map(|call| match call {
        Call::Product(call) => call.product.to_string(),
        _ => "-".to_owned(),
    });
    text.collect()
}

#[test]
fn matrices_are_products_of_the_library() {
    assert_eq!(products(PLAIN), ["[5, 7] · [7, 3] of bf16"]);
    assert_eq!(products(TRANSPOSED), ["[5, 7]ᵀ · [7, 3]ᵀ of bf16"]);
    assert_eq!(products(BATCH), ["6 x [5, 7] · [7, 4] of bf16"]);
    assert_eq!(products(HEADS), ["2 x [5, 4] · [4, 5]ᵀ of bf16"; 2]);
    assert_eq!(products(REPEATED), ["4 x [5, 3] · [3, 6]ᵀ of bf16"; 2]);
    assert_eq!(products(SPLIT_ROWS), ["4 x [3, 7]ᵀ · [7, 6] of bf16"]);
    assert_eq!(products(NOTHING), ["-"]);
    assert_eq!(products(WINDOWS), ["-"; 3]);
}

/// The calls of a product with padded extents, as one letter each: a copy, the product on copies, the
/// product itself.
fn padded(case: &str) -> String {
    let calls = Emitted::new(&graph(&cases(&[case], "bf16"))).calls;
    let letter = |call: &Call| match call {
        Call::Padded(_) => 'P',
        Call::Product(_) => 'p',
        _ => 'c',
    };
    calls.iter().map(letter).collect()
}

fn plain(rows: usize, columns: usize, depth: usize) -> String {
    format!(
        "$a = parameter : T[{rows},{depth}]
        $b = parameter : T[{depth},{columns}]
        $c = dot_general $a, $b {{a_contract=[1], b_contract=[0]}} : T[{rows},{columns}]
        return $c"
    )
}

#[test]
fn a_vocabulary_of_odd_extent_is_padded() {
    // The logits, their gradient's way back, and the weights' gradient.
    assert_eq!(padded(&plain(4096, 30_522, 768)), "cPc");
    assert_eq!(padded(&plain(4096, 768, 30_522)), "ccP");
    assert_eq!(padded(&plain(30_522, 768, 4096)), "cPc");
    // Nothing to pad, and nothing to gain.
    assert_eq!(padded(&plain(4096, 30_528, 768)), "p");
    assert_eq!(padded(&plain(512, 30_522, 64)), "p");
    let f32 = Emitted::new(&graph(&cases(&[&plain(4096, 30_522, 768)], "f32")));
    assert_eq!(f32.calls.len(), 1);
    let logits = graph(&cases(
        &[&plain(4096, 30_522, 768), &plain(30_522, 767, 4096)],
        "bf16",
    ));
    machine_code(&Emitted::new(&logits).functions);
}

#[test]
fn products_on_padded_copies_are_right() {
    let exchanged = "$a = parameter : T[23,41]
        $b = parameter : T[9,23]
        $c = dot_general $a, $b {a_contract=[0], b_contract=[1]} : T[41,9]
        return $c";
    let windows = "$x = parameter : T[30,50]
        $y = parameter : T[40,24]
        $a = slice $x {starts=[3,5], limits=[19,45], steps=[1,1]} : T[16,40]
        $c = dot_general $a, $y {a_contract=[1], b_contract=[0]} : T[16,24]
        return $c";
    let all = [
        plain(17, 19, 21),
        plain(16, 19, 32),
        plain(16, 24, 9),
        plain(8, 10, 12),
    ];
    let mut all: Vec<&str> = all.iter().map(String::as_str).collect();
    all.extend([exchanged, windows]);
    for dtype in ["bf16", "f16"] {
        let graph = graph(&cases(&all, dtype));
        let mut comparison = Differential::new(&graph);
        comparison.target.padding = Padding::Always;
        let step = comparison.compile().unwrap();
        let products = step
            .code
            .calls
            .iter()
            .filter(|call| matches!(call.kind, CallKind::Product { .. }));
        assert!(
            step.code.calls.len() > products.count() + all.len(),
            "nothing was copied"
        );
        assert_eq!(comparison.check(), Ok(Outcome::Same));
    }
}
