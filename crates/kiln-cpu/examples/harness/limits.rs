//! What a machine can do on some threads: multiply registers alone, and read memory.

use std::fmt;
use std::time::{Duration, Instant};

use kiln_cpu::kernels::{KernelText, Param, standalone};
use kiln_cpu::{AlignedBuffer, BuildOptions, Isa, Library, NoHooks, StepArguments, ThreadPool, Toolchain};

type Error = Box<dyn std::error::Error>;

/// The best of so many runs.
const RUNS: usize = 9;

/// Bytes that are read: more than caches hold.
const BYTES: usize = 1 << 30;

/// Rates of all threads together.
pub struct Limits {
    /// GFLOP/s of multiply-adds of f32.
    pub f32: f64,
    /// GFLOP/s of products of bf16 that are added to f32: of tiles, pairs or, where there are neither, f32.
    pub bf16: f64,
    /// GB/s read.
    pub reading: f64,
}

impl fmt::Display for Limits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { f32, bf16, reading } = self;
        write!(
            f,
            "registers alone {f32:.0} GFLOP/s of f32, {bf16:.0} of bf16; reading {reading:.0} GB/s"
        )
    }
}

impl Limits {
    /// Measures on the threads of `pool`.
    pub fn measure(toolchain: &Toolchain, pool: &ThreadPool) -> Result<Self, Error> {
        let isa = toolchain.isa();
        let lanes = isa.lanes().max(4);
        let f32 = chains("vf", "vf_fma", 2 * lanes);
        let bf16 = match (isa.has_tiles(), isa.has_bf16_pairs()) {
            (true, _) => tiles(),
            (_, true) => chains("vu", "vf_dot_bf16", 4 * lanes),
            _ => chains("vf", "vf_fma", 2 * lanes),
        };
        Ok(Self {
            f32: rate(toolchain, pool, isa, &f32)?,
            bf16: rate(toolchain, pool, isa, &bf16)?,
            reading: reading(pool)?,
        })
    }
}

/// Statements of a loop `i` and around it, and the operations of a round.
struct Loop {
    before: String,
    round: String,
    after: String,
    operations: usize,
}

/// Independent multiply-adds, each of so many operations.
fn chains(vector: &str, multiply: &str, operations: usize) -> Loop {
    const CHAINS: usize = 24;
    let each = |text: &dyn Fn(usize) -> String| (0..CHAINS).map(text).collect::<Vec<_>>().join(" ");
    let sums = each(&|c| format!("c{c} = {{0}},"));
    // The compiler must know nothing of the chains, or it would join them.
    let hidden = each(&|c| format!("__asm__(\"\" : \"+m\"(c{c}));"));
    let total = each(&|c| format!("all += c{c};"));
    Loop {
        before: format!("{vector} a = {{0}}, b = {{0}}; vf {sums} all = {{0}}; {hidden}"),
        round: each(&|c| format!("c{c} = {multiply}(a, b, c{c});")),
        after: format!("{total} vf_store(out + unit * KILN_LANES, all);"),
        operations: CHAINS * operations,
    }
}

/// Four products of tiles.
fn tiles() -> Loop {
    let zero = (0..8)
        .map(|t| format!("kiln_tile_zero({t});"))
        .collect::<String>();
    Loop {
        before: format!("kiln_tiles_begin(); {zero}"),
        round:
            "kiln_tile_dot(0, 4, 6); kiln_tile_dot(1, 4, 7); kiln_tile_dot(2, 5, 6); kiln_tile_dot(3, 5, 7);"
                .into(),
        after: "kiln_tiles_end();".into(),
        operations: 4 * 2 * 16 * 16 * 32,
    }
}

/// GFLOP/s of a loop on all threads.
fn rate(toolchain: &Toolchain, pool: &ThreadPool, isa: Isa, of: &Loop) -> Result<f64, Error> {
    const ROUNDS: usize = 100_000;
    let Loop {
        before,
        round,
        after,
        operations,
    } = of;
    let head = "void peak(const kiln_runtime *rt, const float *left, const float *right, float *out, char *workspace)";
    let threads = pool.threads();
    let source = format!(
        "static void peak_part(void *ctx, int64_t begin, int64_t end, int thread) {{\n    float *out = *(float **)ctx;\n    for (int64_t unit = \
         begin; unit < end; unit++) {{\n        {before}\n        for (int64_t i = 0; i < {ROUNDS}; i++) {{ {round} }}\n        {after}\n    }}\n}}\n{head} {{\n    \
         rt->parallel_for(rt->pool, {threads}, 1, peak_part, &out);\n}}\n"
    );
    let kernel = KernelText {
        name: "peak".into(),
        params: [
            ("const float *", "left"),
            ("const float *", "right"),
            ("float *", "out"),
        ]
        .map(|(ctype, name)| Param::new(ctype, name))
        .to_vec(),
        prototype: format!("{head};"),
        source,
        helpers: Vec::new(),
        workspace_bytes: 0,
    };
    let files = standalone::step(&[kernel], isa);
    let built = toolchain.build(&files, &BuildOptions::default())?;
    let step = Library::load(built.path())?.step();
    let input = AlignedBuffer::zeroed(64)?;
    let mut out = AlignedBuffer::zeroed(64 * threads)?;
    let mut arena = AlignedBuffer::zeroed(0)?;
    let mut best = Duration::MAX;
    for _ in 0..RUNS {
        let arguments = StepArguments {
            inputs: &[input.as_ptr(); 2],
            outputs: &[out.as_mut_ptr()],
            arena: &mut arena,
            scalars: &[],
        };
        let start = Instant::now();
        // SAFETY: the kernel reads nothing and writes a vector for each thread.
        unsafe { step.run(pool, arguments, &NoHooks) }?;
        best = best.min(start.elapsed());
    }
    Ok((operations * ROUNDS * threads) as f64 / best.as_nanos() as f64)
}

/// GB/s of a sum over more memory than caches hold.
fn reading(pool: &ThreadPool) -> Result<f64, Error> {
    let mut memory = AlignedBuffer::zeroed(BYTES)?;
    memory.as_mut_slice().fill(1);
    let bytes = memory.as_slice();
    let mut best = Duration::MAX;
    for _ in 0..RUNS {
        let start = Instant::now();
        pool.parallel_for(BYTES, 4096, |begin, end, _| {
            let words = bytes[begin..end].chunks_exact(8);
            let sum = words.fold(0u64, |sum, word| {
                sum.wrapping_add(u64::from_ne_bytes(word.try_into().unwrap_or_default()))
            });
            std::hint::black_box(sum);
        });
        best = best.min(start.elapsed());
    }
    Ok(BYTES as f64 / best.as_nanos() as f64)
}
