//! Steps whose products have something behind them: what users' models have there.

use kiln_graph::Graph;

pub mod sums;
pub mod windows;

pub use sums::{Summed, sums};
pub use windows::{windows, windows_alone};

/// Products of all orientations, one whose result is f32, and one of a slice of a matrix.
const PRODUCTS: &str = "graph @products {
  %a = parameter 0 : T[390,200]
  %b = parameter 1 : T[200,264]
  %c = parameter 2 : T[264,200]
  %d = parameter 3 : T[200,392]
  %x = dot_general %a, %b {a_contract=[1], b_contract=[0]} : T[390,264]
  %y = dot_general %a, %c {a_contract=[1], b_contract=[1]} : T[390,264]
  %z = dot_general %d, %b {a_contract=[0], b_contract=[0]} : T[392,264]
  %w = dot_general %d, %c {a_contract=[0], b_contract=[1]} : T[392,264]
  %v = dot_general %d, %b {a_contract=[0], b_contract=[0], result=f32} : f32[392,264]
  %s = slice %a {starts=[0,8], limits=[390,176], steps=[1,1]} : T[390,168]
  %t = slice %b {starts=[16,64], limits=[184,264], steps=[1,1]} : T[168,200]
  %u = dot_general %s, %t {a_contract=[1], b_contract=[0]} : T[390,200]
  return %x, %y, %z, %w, %v, %u
}";

/// SwiGLU: the second product's epilogue reads the first product. Both are stored for the backward pass.
const GATED: &str = "graph @gated {
  %x = parameter 0 : T[8,163,72]
  %p = parameter 1 : T[72,1288]
  %q = parameter 2 : T[72,1288]
  %one = constant 1.0 : f32[]
  %ones = broadcast %one {dims=[]} : f32[8,163,1288]
  %gate = dot_general %x, %p {a_contract=[2], b_contract=[0]} : T[8,163,1288]
  %up = dot_general %x, %q {a_contract=[2], b_contract=[0]} : T[8,163,1288]
  %g = cast %gate : f32[8,163,1288]
  %u = cast %up : f32[8,163,1288]
  %n = neg %g : f32[8,163,1288]
  %e = exp %n : f32[8,163,1288]
  %f = add %e, %ones : f32[8,163,1288]
  %silu = div %g, %f : f32[8,163,1288]
  %h = mul %silu, %u : f32[8,163,1288]
  %out = cast %h : T[8,163,1288]
  return %out, %gate, %up
}";

/// Both gradients of SwiGLU, of a product that nobody else reads; one takes over an argument's memory.
const GATED_GRADIENT: &str = "graph @gated_gradient {
  %dy = parameter 0 : T[1304,72]
  %w = parameter 1 : T[1288,72]
  %gate = parameter 2 : T[1304,1288]
  %up = parameter 3 : T[1304,1288]
  %one = constant 1.0 : f32[]
  %ones = broadcast %one {dims=[]} : f32[1304,1288]
  %dh = dot_general %dy, %w {a_contract=[1], b_contract=[1]} : T[1304,1288]
  %d = cast %dh : f32[1304,1288]
  %g = cast %gate : f32[1304,1288]
  %u = cast %up : f32[1304,1288]
  %n = neg %g : f32[1304,1288]
  %e = exp %n : f32[1304,1288]
  %f = add %e, %ones : f32[1304,1288]
  %s = recip %f : f32[1304,1288]
  %gs = mul %g, %s : f32[1304,1288]
  %du = mul %d, %gs : f32[1304,1288]
  %dup = cast %du : T[1304,1288]
  %r = sub %ones, %s : f32[1304,1288]
  %gr = mul %g, %r : f32[1304,1288]
  %k = add %ones, %gr : f32[1304,1288]
  %sk = mul %s, %k : f32[1304,1288]
  %usk = mul %u, %sk : f32[1304,1288]
  %dg = mul %d, %usk : f32[1304,1288]
  %dgate = cast %dg : T[1304,1288]
  return %dgate (alias 2), %dup
}";

/// A bias of f32 and exact GELU, with what comes before GELU kept; the product itself is not.
const BIAS_GELU: &str = "graph @bias_gelu {
  %x = parameter 0 : T[1302,64]
  %w = parameter 1 : T[64,1288]
  %bias = parameter 2 : f32[1288]
  %half = constant 0.5 : f32[]
  %root = constant 0.7071067811865476 : f32[]
  %one = constant 1.0 : f32[]
  %halves = broadcast %half {dims=[]} : f32[1302,1288]
  %roots = broadcast %root {dims=[]} : f32[1302,1288]
  %ones = broadcast %one {dims=[]} : f32[1302,1288]
  %product = dot_general %x, %w {a_contract=[1], b_contract=[0]} : T[1302,1288]
  %p = cast %product : f32[1302,1288]
  %b = broadcast %bias {dims=[1]} : f32[1302,1288]
  %sum = add %p, %b : f32[1302,1288]
  %pre = cast %sum : T[1302,1288]
  %y = cast %pre : f32[1302,1288]
  %a = mul %y, %roots : f32[1302,1288]
  %c = erf %a : f32[1302,1288]
  %d = add %c, %ones : f32[1302,1288]
  %e = mul %y, %halves : f32[1302,1288]
  %f = mul %e, %d : f32[1302,1288]
  %out = cast %f : T[1302,1288]
  return %pre, %out
}";

/// A factor for each row, dropout by the step's random numbers, a residual of f32, and a scalar of the step.
const RESIDUAL: &str = "graph @residual {
  %x = parameter 0 : T[64,1304]
  %w = parameter 1 : T[64,1288]
  %row = parameter 2 : f32[1304]
  %before = parameter 3 : f32[1304,1288]
  %scale = scalar 0 : f32[]
  %seed = scalar 1 : u64[]
  %stream = scalar 2 : u64[]
  %product = dot_general %x, %w {a_contract=[0], b_contract=[0]} : T[1304,1288]
  %p = cast %product : f32[1304,1288]
  %rows = broadcast %row {dims=[0]} : f32[1304,1288]
  %scaled = mul %p, %rows : f32[1304,1288]
  %r = random uniform %seed, %stream : f32[1304,1288]
  %half = constant 0.5 : f32[]
  %halves = broadcast %half {dims=[]} : f32[1304,1288]
  %keeps = compare lt %r, %halves : bool[1304,1288]
  %kept = cast %keeps : f32[1304,1288]
  %dropped = mul %scaled, %kept : f32[1304,1288]
  %s = broadcast %scale {dims=[]} : f32[1304,1288]
  %more = mul %dropped, %s : f32[1304,1288]
  %sum = add %before, %more : f32[1304,1288]
  %out = cast %sum : T[1304,1288]
  return %out
}";

/// Products that share their left operand, and as many that share their right one: results of 16 bits and of
/// f32.
const SHARED: &str = "graph @shared {
  %x = parameter 0 : T[8,163,72]
  %p = parameter 1 : T[72,512]
  %q = parameter 2 : T[72,256]
  %r = parameter 3 : T[72,640]
  %c = parameter 4 : T[104,768]
  %d = parameter 5 : T[104,512]
  %e = parameter 6 : T[104,1288]
  %query = dot_general %x, %p {a_contract=[2], b_contract=[0]} : T[8,163,512]
  %key = dot_general %x, %q {a_contract=[2], b_contract=[0]} : T[8,163,256]
  %value = dot_general %x, %r {a_contract=[2], b_contract=[0]} : T[8,163,640]
  %first = slice %value {starts=[0,0,0], limits=[8,163,320], steps=[1,1,1]} : T[8,163,320]
  %second = slice %value {starts=[0,0,320], limits=[8,163,640], steps=[1,1,1]} : T[8,163,320]
  %both = mul %first, %second : T[8,163,320]
  %f = dot_general %c, %e {a_contract=[0], b_contract=[0], result=f32} : f32[768,1288]
  %g = dot_general %d, %e {a_contract=[0], b_contract=[0], result=f32} : f32[512,1288]
  return %query, %key, %both, %f, %g
}";

/// A sum of three products of different depths, of which none is a multiple of a tile's.
const SUM: &str = "graph @sum {
  %a = parameter 0 : T[8,163,72]
  %b = parameter 1 : T[8,163,200]
  %c = parameter 2 : T[8,163,104]
  %u = parameter 3 : T[1288,72]
  %v = parameter 4 : T[1288,200]
  %w = parameter 5 : T[1288,104]
  %p = dot_general %a, %u {a_contract=[2], b_contract=[1]} : T[8,163,1288]
  %q = dot_general %b, %v {a_contract=[2], b_contract=[1]} : T[8,163,1288]
  %r = dot_general %c, %w {a_contract=[2], b_contract=[1]} : T[8,163,1288]
  %1 = cast %p : f32[8,163,1288]
  %2 = cast %q : f32[8,163,1288]
  %3 = cast %r : f32[8,163,1288]
  %4 = add %2, %1 : f32[8,163,1288]
  %5 = add %3, %4 : f32[8,163,1288]
  return %5
}";

/// The same of turned operands, with a residual of f32 behind it.
const SUM_AND_RESIDUAL: &str = "graph @sum_and_residual {
  %a = parameter 0 : T[72,1304]
  %b = parameter 1 : T[136,1304]
  %u = parameter 2 : T[72,1288]
  %v = parameter 3 : T[136,1288]
  %before = parameter 4 : f32[1304,1288]
  %p = dot_general %a, %u {a_contract=[0], b_contract=[0]} : T[1304,1288]
  %q = dot_general %b, %v {a_contract=[0], b_contract=[0]} : T[1304,1288]
  %1 = cast %p : f32[1304,1288]
  %2 = cast %q : f32[1304,1288]
  %3 = add %1, %before : f32[1304,1288]
  %4 = add %2, %3 : f32[1304,1288]
  %out = cast %4 : T[1304,1288]
  return %out
}";

/// Three products of one operand, each with a bias of f32.
const BIASED: &str = "graph @biased {
  %x = parameter 0 : T[8,163,72]
  %w0 = parameter 1 : T[72,512]
  %b0 = parameter 2 : f32[512]
  %w1 = parameter 3 : T[72,256]
  %b1 = parameter 4 : f32[256]
  %w2 = parameter 5 : T[72,640]
  %b2 = parameter 6 : f32[640]
  %p0 = dot_general %x, %w0 {a_contract=[2], b_contract=[0]} : T[8,163,512]
  %f0 = cast %p0 : f32[8,163,512]
  %r0 = broadcast %b0 {dims=[2]} : f32[8,163,512]
  %s0 = add %f0, %r0 : f32[8,163,512]
  %o0 = cast %s0 : T[8,163,512]
  %p1 = dot_general %x, %w1 {a_contract=[2], b_contract=[0]} : T[8,163,256]
  %f1 = cast %p1 : f32[8,163,256]
  %r1 = broadcast %b1 {dims=[2]} : f32[8,163,256]
  %s1 = add %f1, %r1 : f32[8,163,256]
  %o1 = cast %s1 : T[8,163,256]
  %p2 = dot_general %x, %w2 {a_contract=[2], b_contract=[0]} : T[8,163,640]
  %f2 = cast %p2 : f32[8,163,640]
  %r2 = broadcast %b2 {dims=[2]} : f32[8,163,640]
  %s2 = add %f2, %r2 : f32[8,163,640]
  %o2 = cast %s2 : T[8,163,640]
  return %o0, %o1, %o2
}";

/// A result that is placed in rows of an odd length: its neighbours are stored one by one.
const PLACED: &str = "graph @placed {
  %x = parameter 0 : T[1304,72]
  %w = parameter 1 : T[72,1288]
  %e = parameter 2 : T[1304,3]
  %p = dot_general %x, %w {a_contract=[1], b_contract=[0]} : T[1304,1288]
  %f = cast %p : f32[1304,1288]
  %t = tanh %f : f32[1304,1288]
  %h = cast %t : T[1304,1288]
  %c = concat %h, %e {axis=1} : T[1304,1291]
  return %c
}";

/// `text` with elements of `dtype`.
fn graph(text: &str, dtype: &str) -> Graph {
    Graph::parse(&text.replace("T[", &format!("{dtype}["))).unwrap_or_else(|error| panic!("{error}"))
}

/// A step whose product has a nest behind it that stores neighbours one by one.
pub fn placed(dtype: &str) -> Graph {
    graph(PLACED, dtype)
}

/// Products with nothing behind them.
pub fn products(dtype: &str) -> Graph {
    graph(PRODUCTS, dtype)
}

/// A step whose products become one.
pub struct Joined {
    pub graph: Graph,
    /// Kernels of the template that this makes.
    pub kernels: usize,
    /// How far each output may be from the interpreter's, if not by its type: a sum of f32 is rounded to 16
    /// bits where its terms were.
    pub tolerances: Option<&'static [f64]>,
}

/// Steps whose products become one.
pub fn joined(dtype: &str) -> Vec<Joined> {
    // Sums are below 128, where neighbours of bf16 are half of one apart.
    let rounded: &[f64] = &[0.75];
    // A sum of f32 may be no number of f16: its terms stay apart.
    let of_sums = |terms: usize| if dtype == "bf16" { 1 } else { terms };
    [
        (SHARED, 2, None),
        (BIASED, 1, None),
        (SUM, of_sums(3), Some(rounded)),
        (SUM_AND_RESIDUAL, of_sums(2), None),
    ]
    .into_iter()
    .map(|(text, kernels, tolerances)| Joined {
        graph: graph(text, dtype),
        kernels,
        tolerances,
    })
    .collect()
}

/// Steps in each of which one product has a nest behind it.
pub fn nests(dtype: &str) -> Vec<Graph> {
    [GATED, GATED_GRADIENT, BIAS_GELU, RESIDUAL]
        .into_iter()
        .map(|text| graph(text, dtype))
        .collect()
}
