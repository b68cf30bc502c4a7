//! Matrix products of random shapes and layouts, with and without fused operands and results.

use kiln_cpu::kernels::element::Storage;
use kiln_cpu::kernels::gemm::{self, Axis, Epilogue, GemmSpec, Operand};
use kiln_cpu::kernels::{KernelText, Param, Width};
use kiln_cpu::{Isa, Toolchain};

use crate::harness::{Random, distance, from_bf16, instruction_sets, run, run_on, to_bf16};

/// One random product.
#[derive(Debug, Clone)]
struct Case {
    batch: Vec<usize>,
    m: usize,
    n: usize,
    k: usize,
    /// Strides of A by batch dimension, row and depth; of B by column in the row's place.
    a: Layout,
    b: Layout,
    c: Layout,
    /// A is read as `2 * |a|`, computed while it is packed.
    prologue: bool,
    /// The result is added to what is there, with a bias for each column, where it is positive.
    epilogue: bool,
    /// How the operands and the result are stored.
    storage: [Storage; 2],
}

/// Strides of an operand, and how many elements it spans.
#[derive(Debug, Clone)]
struct Layout {
    batch: Vec<i64>,
    free: i64,
    depth: i64,
    len: usize,
}

impl Layout {
    /// Batch dimensions outermost (some broadcast), then the two others in either order, possibly with gaps.
    fn random(random: &mut Random, batch: &[usize], free: usize, depth: usize, may_broadcast: bool) -> Self {
        let gap = random.pick(&[0, 0, 0, 1, 5]);
        let spread = random.pick(&[1, 1, 1, 1, 3]);
        let (inner, outer) = if random.below(2) == 0 {
            (free, depth)
        } else {
            (depth, free)
        };
        let inner_stride = spread as i64;
        let outer_stride = (inner * spread + gap) as i64;
        let transposed = inner == depth && inner_stride == spread as i64 && random.below(2) == 0;
        let (free_stride, depth_stride, inner, outer) = if transposed || inner != free {
            (
                outer_stride.max((depth * spread) as i64),
                inner_stride,
                depth,
                free,
            )
        } else {
            (inner_stride, outer_stride, inner, outer)
        };
        let mut stride = (outer as i64 * free_stride.max(depth_stride)).max((inner * spread) as i64);
        let mut strides = vec![0; batch.len()];
        for (position, &extent) in batch.iter().enumerate().rev() {
            if may_broadcast && random.below(4) == 0 {
                continue;
            }
            strides[position] = stride;
            stride *= extent as i64;
        }
        Self {
            batch: strides,
            free: free_stride,
            depth: depth_stride,
            len: stride.max(1) as usize + 64,
        }
    }

    fn at(&self, batch: &[usize], free: usize, depth: usize) -> usize {
        let outer: i64 = batch.iter().zip(&self.batch).map(|(&i, &s)| i as i64 * s).sum();
        (outer + free as i64 * self.free + depth as i64 * self.depth) as usize
    }

    fn dims(&self, batch: &[usize]) -> Vec<(usize, i64)> {
        batch.iter().copied().zip(self.batch.iter().copied()).collect()
    }
}

impl Case {
    fn random(random: &mut Random) -> Self {
        let size = |random: &mut Random| match random.below(6) {
            0 => 1,
            1 => 1 + random.below(8),
            2 => random.pick(&[16, 32, 64, 14, 28]),
            _ => 1 + random.below(90),
        };
        let (m, n) = (size(random), size(random));
        let k = if random.below(8) == 0 {
            random.below(300)
        } else {
            size(random)
        };
        let batch: Vec<usize> = (0..random.below(3)).map(|_| 1 + random.below(3)).collect();
        Self {
            a: Layout::random(random, &batch, m, k, true),
            b: Layout::random(random, &batch, n, k, true),
            c: Layout::random(random, &batch, m, n, false),
            batch,
            m,
            n,
            k,
            prologue: random.below(3) == 0,
            epilogue: random.below(3) == 0,
            storage: [Storage::F32; 2],
        }
    }

    /// The same case with operands of bf16, and a result that is stored so.
    fn of_bf16(self, result: Storage) -> Self {
        Self {
            storage: [Storage::BF16, result],
            ..self
        }
    }

    /// Relative distance from the exact result that rounding explains.
    fn bound(&self) -> f64 {
        // Rounding errors of a running sum grow like the square root of its length.
        let sums = 3e-8 * (10.0 + (self.k as f64).sqrt());
        match self.storage[1] {
            // Half a unit in the last place of 8 bits.
            Storage::BF16 => sums + 2f64.powi(-8),
            _ => sums,
        }
    }

    fn kernel(&self, name: String, isa: Isa, threads: usize) -> KernelText {
        let (a, b, c) = (
            self.a.dims(&self.batch),
            self.b.dims(&self.batch),
            self.c.dims(&self.batch),
        );
        let [of, to] = self.storage;
        let plain = Operand::stored(of, "left", &a, self.a.free, self.a.depth);
        let left = if self.prologue {
            Operand::computed(plain.contiguous, move |at| {
                let element = (plain.load)(at);
                match at.width {
                    Width::Scalar => format!("2.0f * __builtin_fabsf({element})"),
                    Width::Vector => format!("2.0f * vf_abs({element})"),
                }
            })
            .standing_for(of)
        } else {
            plain
        };
        let (row, col) = (self.c.free, self.c.depth);
        let epilogue = if self.epilogue {
            let along = (col == 1).then_some(Axis::Depth);
            Epilogue::custom(along, move |r| {
                let offset = gemm::batch_offset(&c, r.batch).unwrap_or_else(|| "0".into());
                let place = format!("out + {offset} + {} * {row} + {} * {col}", r.row, r.col);
                let before = to.load(r.width, &place);
                match r.width {
                    Width::Scalar => format!(
                        "float y = {} + bias[{}];\ny = {before} + (y > 0 ? y : 0);\n{}",
                        r.value,
                        r.col,
                        to.store(r.width, &place, "y")
                    ),
                    Width::Vector => format!(
                        "vf y = {} + vf_load(bias + {});\ny = {before} + vf_select(y > 0, y, (vf){{0}});\n{}",
                        r.value,
                        r.col,
                        to.store(r.width, &place, "y")
                    ),
                }
            })
        } else {
            Epilogue::store_as(to, "out", &c, row, col)
        };
        let spec = GemmSpec {
            comment: format!("{self:?}"),
            name,
            batch: self.batch.iter().product(),
            m: self.m,
            n: self.n,
            k: self.k,
            a: left,
            b: Operand::stored(of, "right", &b, self.b.free, self.b.depth),
            epilogue,
            params: vec![
                Param::new(format!("const {} *", of.ctype()), "left"),
                Param::new(format!("const {} *", of.ctype()), "right"),
                Param::new("const float *", "bias"),
                Param::new(format!("{} *", to.ctype()), "out"),
            ],
            threads,
        };
        gemm::emit(spec, isa)
    }

    fn reference(&self, a: &[f32], b: &[f32], bias: &[f32], before: &[f32]) -> Vec<f64> {
        let mut out: Vec<f64> = before.iter().map(|&x| x.into()).collect();
        let seen = |x: f32| if self.prologue { 2.0 * x.abs() } else { x };
        for batch in indices(&self.batch) {
            // Each row lies along the depth, whatever the operand's layout is.
            let rows =
                |layout: &Layout, values: &[f32], count: usize, seen: &dyn Fn(f32) -> f32| -> Vec<f64> {
                    (0..count * self.k)
                        .map(|at| seen(values[layout.at(&batch, at / self.k, at % self.k)]).into())
                        .collect()
                };
            let a = rows(&self.a, a, self.m, &seen);
            let b = rows(&self.b, b, self.n, &|x| x);
            let row = |at: usize| at * self.k..(at + 1) * self.k;
            for (i, j) in (0..self.m).flat_map(|i| (0..self.n).map(move |j| (i, j))) {
                let sum: f64 = a[row(i)].iter().zip(&b[row(j)]).map(|(x, y)| x * y).sum();
                let at = self.c.at(&batch, i, j);
                if self.epilogue {
                    out[at] += (sum + f64::from(bias[j])).max(0.0);
                } else {
                    out[at] = sum;
                }
            }
        }
        out
    }
}

/// All indices of a box.
fn indices(extents: &[usize]) -> Vec<Vec<usize>> {
    extents.iter().fold(vec![Vec::new()], |prefixes, &extent| {
        prefixes
            .iter()
            .flat_map(|prefix| (0..extent).map(move |i| [prefix.as_slice(), &[i]].concat()))
            .collect()
    })
}

/// Rounds `values` to what `storage` holds.
fn round(values: &mut [f32], storage: Storage) {
    if storage == Storage::BF16 {
        let rounded = from_bf16(&to_bf16(values));
        values.copy_from_slice(&rounded[..values.len()]);
    }
}

/// `values` as `storage` has them.
fn bits(values: &[f32], storage: Storage) -> Vec<f32> {
    match storage {
        Storage::BF16 => to_bf16(values),
        _ => values.to_vec(),
    }
}

/// Runs the cases for three threads, as [`check_shared`] does.
fn check(cases: &[Case], seed: u64) {
    check_shared(cases, seed, [3]);
}

/// What came of the cases on each instruction set.
type Results = Vec<Vec<Vec<f32>>>;

/// Runs the cases, as each of these numbers of threads shares them, on every instruction set and compares
/// each output, gaps included, with the reference.
fn check_shared<const N: usize>(cases: &[Case], seed: u64, threads: [usize; N]) -> [Results; N] {
    let toolchain = Toolchain::detect().unwrap();
    let mut random = Random::new(seed);
    let data: Vec<[Vec<f32>; 4]> = cases
        .iter()
        .map(|case| {
            let mut values =
                [case.a.len, case.b.len, case.n + 16, case.c.len].map(|count| random.floats(count));
            let [of, to] = case.storage;
            let storage = [of, of, Storage::F32, to];
            values
                .iter_mut()
                .zip(storage)
                .for_each(|(values, storage)| round(values, storage));
            values
        })
        .collect();
    let stored: Vec<[Vec<f32>; 4]> = cases
        .iter()
        .zip(&data)
        .map(|(case, [a, b, bias, c])| {
            let [of, to] = case.storage;
            [bits(a, of), bits(b, of), bias.clone(), bits(c, to)]
        })
        .collect();
    let inputs: Vec<&[f32]> = stored
        .iter()
        .flat_map(|[a, b, bias, _]| [&a[..], &b[..], &bias[..]])
        .collect();
    let outputs: Vec<&[f32]> = stored.iter().map(|[_, _, _, c]| &c[..]).collect();
    let expected: Vec<Vec<f64>> = cases
        .iter()
        .zip(&data)
        .map(|(case, [a, b, bias, c])| case.reference(a, b, bias, c))
        .collect();
    threads.map(|threads| check_with(&toolchain, cases, threads, &inputs, &outputs, &expected))
}

/// The same for one number of threads.
fn check_with(
    toolchain: &Toolchain,
    cases: &[Case],
    threads: usize,
    inputs: &[&[f32]],
    outputs: &[&[f32]],
    expected: &[Vec<f64>],
) -> Results {
    let mut all = Vec::new();
    for (position, isa) in instruction_sets(toolchain).into_iter().enumerate() {
        // All cases on the widest vectors; the first half is enough to see that other widths work alike.
        let count = if position == 0 {
            cases.len()
        } else {
            cases.len().div_ceil(2)
        };
        let cases = &cases[..count];
        let kernels: Vec<KernelText> = cases
            .iter()
            .enumerate()
            .map(|(i, case)| case.kernel(format!("gemm{i}"), isa, threads))
            .collect();
        let (inputs, outputs) = (&inputs[..3 * count], &outputs[..count]);
        let results = run_on(threads.min(3), toolchain, isa, &kernels, inputs, outputs);
        for ((case, expected), result) in cases.iter().zip(expected).zip(&results) {
            let result = match case.storage[1] {
                Storage::BF16 => &from_bf16(result)[..expected.len()],
                _ => result,
            };
            let error = distance(result, expected);
            assert!(error < case.bound(), "{isa}: error {error} in {case:?}");
        }
        all.push(results);
    }
    all
}

#[test]
fn random_products_match_f64() {
    let mut random = Random::new(11);
    let cases: Vec<Case> = (0..48).map(|_| Case::random(&mut random)).collect();
    check(&cases, 12);
}

/// Operands of bf16, with results of f32 and of bf16; two threads read panels in another order than three.
#[test]
fn random_products_of_bf16_match_f64() {
    let mut random = Random::new(21);
    let cases: Vec<Case> = (0..40)
        .map(|number| Case::random(&mut random).of_bf16([Storage::F32, Storage::BF16][number % 2]))
        .collect();
    check_shared(&cases, 22, [2, 3]);
}

fn dense(m: usize, n: usize, k: usize, transposed: [bool; 3]) -> Case {
    let layout = |free: usize, depth: usize, transposed: bool| Layout {
        batch: vec![],
        free: if transposed { 1 } else { depth as i64 },
        depth: if transposed { free as i64 } else { 1 },
        len: free * depth,
    };
    Case {
        batch: vec![],
        m,
        n,
        k,
        a: layout(m, k, transposed[0]),
        b: layout(n, k, transposed[1]),
        c: layout(m, n, transposed[2]),
        prologue: false,
        epilogue: false,
        storage: [Storage::F32; 2],
    }
}

/// Sizes that are shared by threads, streamed along either side, cut along the depth, and read in place;
/// buffers end with the last element, so that a read beyond would hit other memory.
#[test]
fn large_deep_and_skinny_products_match_f64() {
    check(&large_deep_and_skinny(), 5);
}

/// The same of bf16, where a pair may end a cut, a panel or the depth.
#[test]
fn large_deep_and_skinny_products_of_bf16_match_f64() {
    let results = [Storage::F32, Storage::BF16];
    let cases = large_deep_and_skinny().into_iter().enumerate();
    let cases: Vec<Case> = cases
        .map(|(number, case)| case.of_bf16(results[number % 2]))
        .collect();
    check(&cases, 6);
}

/// Extents of whole tiles of 16 and 32, and just beside them, with operands in every order.
#[test]
fn whole_and_partial_tiles_of_bf16_match_f64() {
    let orders = [[false, false], [false, true], [true, false], [true, true]];
    let sizes = [
        (32, 32, 32),
        (48, 80, 96),
        (77, 40, 65),
        (16, 48, 33),
        (95, 97, 62),
    ];
    let mut cases = Vec::new();
    for (number, [a, b]) in orders.into_iter().enumerate() {
        for (place, &(m, n, k)) in sizes.iter().enumerate() {
            let result = [Storage::F32, Storage::BF16][(number + place) % 2];
            let mut case = dense(m, n, k, [a, b, place == 3]).of_bf16(result);
            case.prologue = place % 2 == 1;
            case.epilogue = place == 2;
            cases.push(case);
        }
    }
    // Shared by threads, along rows and along columns.
    cases.push(dense(512, 96, 64, [false, false, false]).of_bf16(Storage::F32));
    cases.push(dense(96, 520, 70, [true, false, false]).of_bf16(Storage::F32));
    // In blocks of panels that were packed before, as far as they go, with the depth cut and with an
    // epilogue.
    cases.push(dense(200, 520, 90, [true, true, false]).of_bf16(Storage::F32));
    cases.push(dense(530, 100, 130, [true, false, false]).of_bf16(Storage::BF16));
    cases.push(dense(100, 230, 8300, [true, true, false]).of_bf16(Storage::F32));
    let mut last = dense(64, 300, 160, [false, true, false]).of_bf16(Storage::BF16);
    last.epilogue = true;
    cases.push(last);
    check_shared(&cases, 31, [2, 3]);
}

/// Gradients of weights, which many threads share in blocks: even ones, such that end within a panel, and
/// with a prologue and an epilogue.
#[test]
fn products_that_threads_share_in_blocks_match_f64() {
    let mut cases = vec![
        dense(280, 290, 2000, [true, true, false]),
        dense(301, 275, 2040, [true, true, false]),
        dense(270, 310, 1999, [true, true, true]),
    ];
    cases[1].epilogue = true;
    cases[2].prologue = true;
    for case in &cases {
        let text = case.kernel("gemm".to_owned(), Isa::Avx512, 16).source;
        assert!(text.contains("threads share blocks"), "{case:?}");
    }
    check_shared(&cases, 41, [16]);
}

/// Deep products of few results, of which threads share slices of the depth: the bits do not depend on how
/// many there are. Depths that are cut as well, last slices of any size, with a prologue and an epilogue.
#[test]
fn deep_products_have_the_same_bits_with_any_number_of_threads() {
    let mut cases = vec![
        dense(70, 131, 4096, [true, true, false]),
        dense(40, 90, 2999, [true, true, false]).of_bf16(Storage::BF16),
        dense(33, 96, 12_345, [true, true, false]),
        dense(33, 48, 18_001, [true, true, false]).of_bf16(Storage::F32),
        dense(160, 240, 4500, [true, true, false]),
        dense(150, 75, 3701, [true, true, true]),
        dense(100, 48, 2600, [false, true, false]),
    ];
    cases[1].prologue = true;
    cases[4].epilogue = true;
    cases[5].prologue = true;
    for case in &cases {
        let text = case.kernel("gemm".to_owned(), Isa::AmxBf16, 2).source;
        assert!(text.contains("threads share the depth"), "{case:?}");
    }
    let [many, few, one] = check_shared(&cases, 43, [16, 2, 1]);
    assert!(many == few && few == one, "sums depend on the number of threads");
}

/// Deep products of tiles whose panels meet in chunks of the depth: in partial sums of a depth that is cut,
/// too, with last panels of any size, along rows and along columns, and in blocks. Streamed panels are packed
/// before, or chunk by chunk.
#[test]
fn deep_products_in_chunks_match_f64() {
    let mut cases = vec![
        dense(64, 96, 4096, [true, true, false]).of_bf16(Storage::F32),
        dense(80, 48, 2900, [false, true, false]).of_bf16(Storage::F32),
        dense(48, 240, 2051, [false, false, false]).of_bf16(Storage::F32),
        dense(100, 75, 8300, [true, true, false]).of_bf16(Storage::BF16),
        dense(33, 130, 9001, [false, true, true]).of_bf16(Storage::F32),
        dense(272, 528, 2222, [true, true, false]).of_bf16(Storage::F32),
        dense(330, 300, 900, [false, true, false]).of_bf16(Storage::BF16),
        dense(290, 310, 800, [true, false, false]).of_bf16(Storage::F32),
    ];
    cases[1].prologue = true;
    cases[3].epilogue = true;
    for threads in [1, 2] {
        for case in &cases {
            let text = case.kernel("gemm".to_owned(), Isa::AmxBf16, threads).source;
            assert!(text.contains("steps at a time"), "{case:?}");
        }
    }
    check_shared(&cases, 51, [1, 2]);
}

fn large_deep_and_skinny() -> Vec<Case> {
    let mut cases = vec![
        dense(150, 70, 9001, [false, true, false]),
        dense(33, 47, 5003, [true, false, false]),
        dense(700, 48, 40, [false, false, false]),
        dense(45, 600, 40, [false, true, true]),
        dense(1, 257, 129, [false, true, false]),
        dense(257, 1, 129, [true, false, false]),
        dense(3, 100, 1, [false, false, false]),
        dense(8, 33, 200, [false, false, false]),
        dense(5, 16, 131, [true, false, false]),
        dense(300, 2, 97, [false, false, true]),
        dense(128, 512, 33, [true, true, false]),
        dense(0, 5, 7, [false, false, false]),
        dense(5, 7, 0, [false, false, false]),
    ];
    for prologue in &mut cases[..4] {
        prologue.prologue = true;
    }
    cases
}

/// Infinity and NaN reach exactly the results whose sums contain them: padding multiplies nothing with them.
#[test]
fn non_finite_values_stay_in_their_rows_and_columns() {
    let toolchain = Toolchain::detect().unwrap();
    let case = dense(19, 37, 23, [false, false, false]);
    let mut a = Random::new(3).floats(case.a.len);
    let b = vec![1f32; case.b.len];
    a[case.a.at(&[], 4, 22)] = f32::NAN;
    a[case.a.at(&[], 18, 0)] = f32::INFINITY;
    let both = [Storage::F32, Storage::BF16];
    let isas = instruction_sets(&toolchain).into_iter();
    for (isa, of) in isas.flat_map(|isa| both.map(|of| (isa, of))) {
        let case = Case {
            storage: [of, Storage::F32],
            ..case.clone()
        };
        let kernel = case.kernel("gemm".into(), isa, 3);
        let c = &run(
            &toolchain,
            isa,
            &[kernel],
            &[&bits(&a, of), &bits(&b, of), &[0.0; 64]],
            &[&vec![0.0; case.c.len]],
        )[0];
        for i in 0..case.m {
            for j in 0..case.n {
                let value = c[case.c.at(&[], i, j)];
                match i {
                    4 => assert!(value.is_nan()),
                    18 => assert_eq!(value, f32::INFINITY),
                    _ => assert!(value.is_finite(), "{isa} {i} {j}"),
                }
            }
        }
    }
}
