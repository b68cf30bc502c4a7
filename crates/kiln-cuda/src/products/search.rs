//! Which of the library's algorithms is the fastest on a shape.
//!
//! The library's heuristic names algorithms in the order in which it believes in them; its first is up to
//! twice as slow as the best. Each is timed by events of the device, on operands of random bits: products of
//! zeros are faster than products of data.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::describe::{Described, Preference};
use super::product::{Number, Product, ScalarsFrom};
use super::run::{Place, ProductArguments};
use super::{Multiplier, PreparedProduct, check};
use crate::error::{CudaError, Result};
use crate::runtime::{Storage, Stream};
use crate::sys::cublaslt::HeuristicResult;

/// How far a search goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SearchLimits {
    /// Bytes of working memory that the algorithm may have.
    pub workspace_bytes: u64,
    /// How many algorithms the library is asked for.
    pub algorithms: usize,
    /// The most runs of one algorithm that are timed together.
    pub runs: u32,
}

impl Default for SearchLimits {
    /// 32 MiB, which is what the library's own fastest algorithms ask for on this generation; 32 algorithms;
    /// 10 runs.
    fn default() -> Self {
        Self {
            workspace_bytes: 32 << 20,
            algorithms: 32,
            runs: 10,
        }
    }
}

/// An algorithm for one product, of one version of the library, on one kind of device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Choice {
    /// The algorithm with its settings, in the library's form.
    pub algorithm: [u64; 8],
    /// Bytes of working memory.
    pub workspace_bytes: u64,
    /// Time of one run, in microseconds.
    pub microseconds: f32,
    /// The same of the library's first proposal.
    pub first_microseconds: f32,
    /// How many algorithms were timed.
    pub timed: usize,
    /// The library's version.
    pub library: String,
}

/// A first run this many times as slow as the best is not timed further.
const HOPELESS: f32 = 2.0;
/// Microseconds that the timed runs of one algorithm should take together, so that the clock's half
/// microsecond is little.
const TIMED_MICROSECONDS: f32 = 500.0;

impl Multiplier {
    /// Times the library's algorithms for `product` and returns the fastest.
    ///
    /// # Errors
    /// [`CudaError::Product`] if the library has none, [`CudaError::OutOfMemory`] for operands to try them
    /// on, [`CudaError::Lost`].
    pub fn search(&self, stream: &Stream, product: &Product, limits: SearchLimits) -> Result<Choice> {
        let candidates = self.candidates(product, limits)?;
        let trial = Trial::new(stream, product, &candidates)?;
        let mut best: Option<Choice> = None;
        let mut first = None;
        let mut timed = 0;
        let mut refused = None;
        for candidate in &candidates {
            let described = Described::new(self, product)?;
            let mut prepared =
                self.prepared(product, described, candidate.algorithm, candidate.workspace_bytes);
            let fastest = best.as_ref().map(|best| best.microseconds);
            let microseconds = match trial.time(stream, &mut prepared, limits.runs, fastest) {
                Ok(microseconds) => microseconds,
                Err(error @ CudaError::Product { .. }) => {
                    refused = Some(error);
                    continue;
                }
                Err(error) => return Err(error),
            };
            timed += 1;
            first.get_or_insert(microseconds);
            if fastest.is_none_or(|fastest| microseconds < fastest) {
                best = Some(Choice {
                    algorithm: candidate.algorithm.0,
                    workspace_bytes: candidate.workspace_bytes as u64,
                    microseconds,
                    first_microseconds: microseconds,
                    timed,
                    library: self.version().to_owned(),
                });
            }
        }
        let mut best = best.ok_or_else(|| refused.unwrap_or_else(|| no_algorithm(product)))?;
        best.timed = timed;
        best.first_microseconds = first.unwrap_or(best.microseconds);
        tracing::debug!(%product, ?best, "an algorithm was chosen");
        Ok(best)
    }

    /// The heuristic's proposals, best first. For most products it names at most eight algorithms however
    /// many it is asked for, and other ones where it may use less working memory; so it is asked for three
    /// sizes.
    fn candidates(&self, product: &Product, limits: SearchLimits) -> Result<Vec<HeuristicResult>> {
        let described = Described::new(self, product)?;
        let mut candidates: Vec<HeuristicResult> = Vec::new();
        let mut refused = None;
        for workspace_bytes in [limits.workspace_bytes, limits.workspace_bytes / 8, 0] {
            match self.propose(product, &described, workspace_bytes, limits.algorithms) {
                Ok(proposed) => {
                    for result in proposed {
                        if !candidates.iter().any(|known| known.algorithm == result.algorithm) {
                            candidates.push(result);
                        }
                    }
                }
                Err(error @ CudaError::Product { .. }) => refused = Some(error),
                Err(error) => return Err(error),
            }
        }
        candidates.truncate(limits.algorithms.max(1));
        if candidates.is_empty() {
            return Err(refused.unwrap_or_else(|| no_algorithm(product)));
        }
        Ok(candidates)
    }

    /// The heuristic's answer for one size of working memory.
    fn propose(
        &self,
        product: &Product,
        described: &Described,
        workspace_bytes: u64,
        count: usize,
    ) -> Result<Vec<HeuristicResult>> {
        let preference = Preference::new(&self.library, workspace_bytes, product)?;
        let mut results = vec![HeuristicResult::default(); count.max(1)];
        let wanted = i32::try_from(results.len()).unwrap_or(i32::MAX);
        let mut found = 0;
        self.device.enter()?;
        // SAFETY: all descriptions are alive, and the array has as many places as the library is told.
        let status = unsafe {
            (self.library.functions.cublasLtMatmulAlgoGetHeuristic)(
                self.handle,
                described.description,
                described.a,
                described.b,
                described.d,
                described.d,
                preference.raw,
                wanted,
                results.as_mut_ptr(),
                &raw mut found,
            )
        };
        check(status, "cublasLtMatmulAlgoGetHeuristic", || product.to_string())?;
        results.truncate(usize::try_from(found).unwrap_or(0));
        results.retain(|result| result.state == 0 && result.workspace_bytes as u64 <= workspace_bytes);
        Ok(results)
    }
}

fn no_algorithm(product: &Product) -> CudaError {
    CudaError::Product {
        product: product.to_string(),
        call: "cublasLtMatmulAlgoGetHeuristic",
        what: "that it has no algorithm for it".into(),
    }
}

/// Memory to try algorithms on.
struct Trial {
    left: Arc<Storage>,
    right: Arc<Storage>,
    result: Arc<Storage>,
    vector: Arc<Storage>,
    scalars: Arc<Storage>,
    workspace: Arc<Storage>,
}

impl Trial {
    fn new(stream: &Stream, product: &Product, candidates: &[HeuristicResult]) -> Result<Self> {
        let workspace = candidates
            .iter()
            .map(|candidate| candidate.workspace_bytes)
            .max()
            .unwrap_or(0);
        let number = product.result.number;
        // As factors: alpha is 1 and beta 0.
        let scalars = Arc::new(Storage::allocate(stream, 16)?);
        if product.scalars == ScalarsFrom::Device {
            stream.fill(&scalars, 0..16, 0)?;
            match product.scalar_bytes() {
                8 => stream.write(&1.0_f64.to_ne_bytes(), &scalars, 0)?,
                _ => stream.write(&1.0_f32.to_ne_bytes(), &scalars, 0)?,
            }
        }
        Ok(Self {
            left: random(stream, product.left_bytes(), product.left.number)?,
            right: random(stream, product.right_bytes(), product.right.number)?,
            result: random(stream, product.result_bytes(), number)?,
            vector: random(stream, product.vector_bytes(), number)?,
            scalars,
            workspace: Arc::new(Storage::allocate(stream, workspace)?),
        })
    }

    /// Microseconds of one run; a first guess if that is hopeless beside `fastest`.
    fn time(
        &self,
        stream: &Stream,
        prepared: &mut PreparedProduct<'_>,
        runs: u32,
        fastest: Option<f32>,
    ) -> Result<f32> {
        let place = |storage| -> Option<Place<'_>> { Some((storage, 0)) };
        let arguments = ProductArguments {
            left: (&self.left, 0),
            right: (&self.right, 0),
            result: (&self.result, 0),
            vector: place(&self.vector),
            scalars: place(&self.scalars),
            workspace: place(&self.workspace),
        };
        time_runs(stream, runs, fastest, || prepared.run(stream, &arguments))
    }
}

/// Microseconds of one of at most `runs` runs of a library's call that `run` queues; a first guess if that is
/// hopeless beside `fastest`.
pub(crate) fn time_runs(
    stream: &Stream,
    runs: u32,
    fastest: Option<f32>,
    mut run: impl FnMut() -> Result<()>,
) -> Result<f32> {
    let mut time = |runs: u32| -> Result<f32> {
        let start = stream.record_time()?;
        for _ in 0..runs {
            run()?;
        }
        let end = stream.record_time()?;
        #[allow(clippy::cast_precision_loss, reason = "a count of at most some dozens")]
        let runs = runs as f32;
        Ok(end.milliseconds_since(&start)? * 1000.0 / runs)
    };
    // The first run loads the library's code.
    time(1)?;
    let guess = time(1)?;
    if fastest.is_some_and(|fastest| guess > HOPELESS * fastest.max(10.0)) {
        return Ok(guess);
    }
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "between one and `runs`"
    )]
    let runs = (TIMED_MICROSECONDS / guess.max(1.0)).clamp(1.0, runs.max(1) as f32) as u32;
    Ok(time(runs)?.min(time(runs)?))
}

/// `bytes` bytes of random numbers between -1 and 1.
pub(crate) fn random(stream: &Stream, bytes: usize, number: Number) -> Result<Arc<Storage>> {
    /// Bytes that are drawn on the host; the device repeats them.
    const BLOCK: usize = 1 << 20;
    let storage = Arc::new(Storage::allocate(stream, bytes)?);
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut block = Vec::with_capacity(BLOCK);
    while block.len() < BLOCK.min(bytes) {
        // Xorshift; the top bits are the better ones.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        // A sign, an exponent just below that of 1, a fraction.
        let (sign, exponent) = (state >> 63, state >> 40 & 3);
        match number {
            Number::F64 => {
                let bits = sign << 63 | (1019 + exponent) << 52 | state & ((1 << 52) - 1);
                block.extend(bits.to_ne_bytes());
            }
            Number::F32 => {
                let bits = (sign << 31 | (123 + exponent) << 23 | state & ((1 << 23) - 1)) as u32;
                block.extend(bits.to_ne_bytes());
            }
            Number::F16 => {
                let bits = (sign << 15 | (11 + exponent) << 10 | state & ((1 << 10) - 1)) as u16;
                block.extend(bits.to_ne_bytes());
            }
            Number::Bf16 => {
                let bits = (sign << 15 | (123 + exponent) << 7 | state & ((1 << 7) - 1)) as u16;
                block.extend(bits.to_ne_bytes());
            }
        }
    }
    let mut filled = block.len().min(bytes);
    stream.write(&block[..filled], &storage, 0)?;
    while filled < bytes {
        let more = filled.min(bytes - filled);
        stream.copy(&storage, 0..more, &storage, filled)?;
        filled += more;
    }
    Ok(storage)
}
