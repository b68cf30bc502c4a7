//! Which of the library's algorithms is the fastest on a shape.
//!
//! The library's heuristic names algorithms in the order in which it believes in them; its first is up to
//! twice as slow as the best. Each is timed by events of the device, on operands of random bits: products of
//! zeros are faster than products of data.

use std::sync::{Arc, OnceLock};

use serde::{Deserialize, Serialize};

use super::describe::{Described, Preference};
use super::product::{ALIGNED, Number, Product, ScalarsFrom};
use super::run::{Place, ProductArguments};
use super::timing::{fastest, time_runs};
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
    /// Time of one run, in microseconds; 0 if none was timed.
    pub microseconds: f32,
    /// The same of the library's first proposal.
    pub first_microseconds: f32,
    /// How many algorithms were timed.
    pub timed: usize,
    /// The library's version.
    pub library: String,
}

impl Multiplier {
    /// Times the library's algorithms for `product` and returns the fastest.
    ///
    /// Where there is no memory for operands to try them on, it is the one that the library proposes first,
    /// with a warning.
    ///
    /// # Errors
    /// [`CudaError::Product`] if the library has none, [`CudaError::Lost`].
    pub fn search(&self, stream: &Stream, product: &Product, limits: SearchLimits) -> Result<Choice> {
        let candidates = self.candidates(product, limits)?;
        let workspace = candidates.iter().map(|candidate| candidate.workspace_bytes);
        let trial = match Trial::new(stream, product, workspace.max().unwrap_or(0)) {
            Ok(trial) => trial,
            Err(error @ CudaError::OutOfMemory { .. }) => {
                kiln_log::warn!(
                    target: "kiln", %product, %error,
                    "no memory to try the library's algorithms on: the first that it proposes is taken"
                );
                return Ok(self.choice(&candidates[0], [0.0; 2], 0));
            }
            Err(error) => return Err(error),
        };
        let mut timed: Vec<((&HeuristicResult, PreparedProduct<'_>), f32)> = Vec::new();
        let mut least: Option<f32> = None;
        let mut refused = None;
        for candidate in &candidates {
            let described = Described::new(self, product)?;
            let mut prepared =
                self.prepared(product, described, candidate.algorithm, candidate.workspace_bytes);
            let run = || prepared.run(stream, &trial.arguments());
            let microseconds = match time_runs(stream, limits.runs, least, run) {
                Ok(microseconds) => microseconds,
                Err(error @ CudaError::Product { .. }) => {
                    refused = Some(error);
                    continue;
                }
                Err(error) => return Err(error),
            };
            least = Some(least.map_or(microseconds, |least| least.min(microseconds)));
            timed.push(((candidate, prepared), microseconds));
        }
        let run = |(_, prepared): &mut (_, PreparedProduct<'_>)| prepared.run(stream, &trial.arguments());
        let best = fastest(stream, limits.runs, &mut timed, run)?;
        let best = best.ok_or_else(|| refused.unwrap_or_else(|| no_algorithm(product)))?;
        let ((candidate, _), microseconds) = &timed[best];
        let best = self.choice(candidate, [*microseconds, timed[0].1], timed.len());
        tracing::debug!(%product, ?best, "an algorithm was chosen");
        Ok(best)
    }

    /// The choice of `result`, of so many that were timed, with its own time and that of the first.
    fn choice(&self, result: &HeuristicResult, [own, first]: [f32; 2], timed: usize) -> Choice {
        Choice {
            algorithm: result.algorithm.0,
            workspace_bytes: result.workspace_bytes as u64,
            microseconds: own,
            first_microseconds: first,
            timed,
            library: self.version().to_owned(),
        }
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

/// Memory to try a product on.
pub(crate) struct Trial {
    left: Arc<Storage>,
    right: Arc<Storage>,
    result: Arc<Storage>,
    /// Where the matrices begin there: at addresses as the product's are.
    starts: [usize; 3],
    vector: Arc<Storage>,
    scalars: Arc<Storage>,
    workspace: Arc<Storage>,
}

impl Trial {
    /// Operands of random bits for `product`, and so many bytes of working memory.
    pub(crate) fn new(stream: &Stream, product: &Product, workspace_bytes: usize) -> Result<Self> {
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
        let starts = product.alignments.map(|alignment| match alignment {
            ALIGNED => 0,
            alignment => alignment as usize,
        });
        let [left, right, result] = starts;
        Ok(Self {
            left: random(stream, left + product.left_bytes(), product.left.number)?,
            right: random_for(
                stream,
                right + product.right_bytes(),
                product.right.number,
                Operand::Second,
                0,
            )?,
            result: random(stream, result + product.result_bytes(), number)?,
            starts,
            vector: random(stream, product.vector_bytes(), number)?,
            scalars,
            workspace: Arc::new(Storage::allocate(stream, workspace_bytes)?),
        })
    }

    /// The arguments of a run.
    pub(crate) fn arguments(&self) -> ProductArguments<'_> {
        let place = |storage| -> Option<Place<'_>> { Some((storage, 0)) };
        let [left, right, result] = self.starts;
        ProductArguments {
            left: (&self.left, left),
            right: (&self.right, right),
            result: (&self.result, result),
            vector: place(&self.vector),
            scalars: place(&self.scalars),
            workspace: place(&self.workspace),
        }
    }
}

/// Bytes that [`random`] draws on the host; the device repeats them. The images and rows of real tensors are
/// whole numbers of powers of two, and of small multiples of these. A prime, 131,071, keeps the period from
/// being one of them: then all images would be the same, and a result of the wrong image as right as any.
pub(crate) const BLOCK: usize = 8 * 131_071;

/// Which operand random numbers are for. Were both the same, a result of the wrong operand would not differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operand {
    First,
    Second,
}

/// `bytes` bytes of random numbers between -1 and 1: those of [`block`] for the first operand, over and over.
pub(crate) fn random(stream: &Stream, bytes: usize, number: Number) -> Result<Arc<Storage>> {
    random_for(stream, bytes, number, Operand::First, 0)
}

/// As [`random`], for either operand, with `margin` bytes of NaNs in front and behind.
pub(crate) fn random_for(
    stream: &Stream,
    bytes: usize,
    number: Number,
    operand: Operand,
    margin: usize,
) -> Result<Arc<Storage>> {
    let storage = Arc::new(Storage::allocate(stream, margin + bytes + margin)?);
    let block = block(number, operand);
    let mut filled = block.len().min(bytes);
    stream.fill(&storage, 0..margin, NANS)?;
    stream.fill(&storage, margin + bytes..storage.bytes(), NANS)?;
    stream.write(&block[..filled], &storage, margin)?;
    while filled < bytes {
        let more = filled.min(bytes - filled);
        stream.copy(&storage, margin..margin + more, &storage, margin + filled)?;
        filled += more;
    }
    Ok(storage)
}

/// All bytes of what is a NaN in every type.
pub(crate) const NANS: u8 = 0xff;

/// What [`random_for`] repeats, [`BLOCK`] bytes, drawn once.
pub(crate) fn block(number: Number, operand: Operand) -> &'static [u8] {
    static DRAWN: [[OnceLock<Vec<u8>>; 4]; 2] = [const { [const { OnceLock::new() }; 4] }; 2];
    DRAWN[operand as usize][number as usize].get_or_init(|| draw(number, operand))
}

fn draw(number: Number, operand: Operand) -> Vec<u8> {
    // Any two numbers but zero.
    let mut state: u64 = match operand {
        Operand::First => 0x9e37_79b9_7f4a_7c15,
        Operand::Second => 0xd1b5_4a32_d192_ed03,
    };
    let mut block = Vec::with_capacity(BLOCK);
    while block.len() < BLOCK {
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
    block
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::Device;
    use crate::testing::FakeDriver;

    const NUMBERS: [Number; 4] = [Number::F64, Number::F32, Number::F16, Number::Bf16];

    /// What lies some power of two further on, or three, five or seven of them, is not the same again.
    #[test]
    fn images_of_round_sizes_differ() {
        for number in NUMBERS {
            let block = block(number, Operand::First);
            assert_eq!(block.len(), BLOCK);
            let size = number.bytes();
            let from = |at: usize| (0..256).map(move |byte| block[(at * size + byte) % BLOCK]);
            for power in 0..32 {
                for odd in [1, 3, 5, 7, 9, 49] {
                    assert!(!from(0).eq(from(odd << power)), "{number}: {odd} << {power}");
                }
            }
        }
    }

    #[test]
    fn operands_differ() {
        for number in NUMBERS {
            let [first, second] = [Operand::First, Operand::Second].map(|operand| block(number, operand));
            let same = first.iter().zip(second).filter(|(a, b)| a == b).count();
            assert!(same < BLOCK / 8, "{number}: {same}");
        }
    }

    #[test]
    fn memory_repeats_the_block() {
        let fake = FakeDriver::start(1, 16 << 20).unwrap();
        let stream = Device::open(fake.driver(), 0).unwrap().stream().unwrap();
        for bytes in [24, BLOCK, 3 * BLOCK + 24] {
            let memory = random_for(&stream, bytes, Number::F16, Operand::Second, 0).unwrap();
            let mut found = vec![0; bytes];
            stream.read(&memory, 0, &mut found).unwrap();
            let block = block(Number::F16, Operand::Second);
            assert!(found.iter().eq(block.iter().cycle().take(bytes)), "{bytes}");
        }
    }
}
