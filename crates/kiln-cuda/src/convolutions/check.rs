//! Whether a plan computes what was asked for.
//!
//! One of cuDNN 9's engines gives wrong weight gradients of f32 where a window with gaps has strides, or where
//! single elements have padding. The heuristic names it second or third, and now and then it is the fastest.
//! So a plan's result is compared with plain sums, at some of its elements, before the plan may be chosen.

use super::convolution::{Convolution, Task, Tensor};
use super::run::ConvolutionArguments;
use crate::error::Result;
use crate::products::{Number, Place, block};
use crate::runtime::Stream;

/// Products that the plain sums may have together.
const PRODUCTS: usize = 256 << 10;

/// Results of so many bytes are read as a whole.
const SMALL: usize = 1 << 20;

/// Elements of a result, and what they should be.
pub(super) struct Check {
    elements: Vec<Element>,
    number: Number,
    /// Bytes of the result.
    bytes: usize,
}

struct Element {
    /// Its place in the result's memory, in elements.
    at: usize,
    sum: f64,
    /// The root of the sum of the products' squares: what rounding errors are measured by.
    spread: f64,
}

impl Check {
    /// For operands that [`crate::products::random`] has filled.
    pub(super) fn new(convolution: &Convolution) -> Self {
        let [first, second, result] = convolution.tensors();
        let depth = (convolution.multiplications() / result.elements().max(1) as f64).max(1.0);
        let most = if result.bytes() <= SMALL { 64 } else { 16 };
        let count = ((PRODUCTS as f64 / depth) as usize).clamp(3, most);
        let factor = |operand: &Tensor, at: usize| {
            let (block, size) = (block(operand.number), operand.number.bytes());
            value(operand.number, &block[at * size % block.len()..][..size])
        };
        let elements = (0..count).map(|number| {
            let index = place(number, &result.extents);
            let (mut sum, mut squares) = (0.0, 0.0);
            products(convolution, &index, |a, b| {
                let product = factor(first, a) * factor(second, b);
                sum += product;
                squares += product * product;
            });
            Element {
                at: offset(result, &index),
                sum,
                spread: f64::sqrt(squares),
            }
        });
        Self {
            elements: elements.collect(),
            number: result.number,
            bytes: result.bytes(),
        }
    }

    /// Whether `run`, which queues a plan on these arguments, leaves the right elements.
    pub(super) fn passes(
        &self,
        stream: &Stream,
        task: Task,
        arguments: &ConvolutionArguments<'_>,
        run: impl FnOnce() -> Result<()>,
    ) -> Result<bool> {
        let (storage, start): Place<'_> = match task {
            Task::Forward => arguments.y,
            Task::InputGradient => arguments.x,
            Task::WeightGradient => arguments.w,
        };
        let size = self.number.bytes();
        let parts: Vec<(usize, usize)> = match self.bytes <= SMALL {
            true => vec![(0, self.bytes)],
            false => self
                .elements
                .iter()
                .map(|element| (element.at * size, size))
                .collect(),
        };
        // An engine that writes nothing must not find what another has written.
        for &(at, bytes) in &parts {
            stream.write(&vec![0xff; bytes], storage, start + at)?;
        }
        run()?;
        let mut found = Vec::with_capacity(parts.len());
        for &(at, bytes) in &parts {
            let mut part = vec![0; bytes];
            stream.read(storage, start + at, &mut part)?;
            found.push(part);
        }
        let right = self.elements.iter().enumerate().all(|(number, element)| {
            let bytes = match self.bytes <= SMALL {
                true => &found[0][element.at * size..][..size],
                false => &found[number][..],
            };
            element.is(value(self.number, bytes), self.number)
        });
        Ok(right)
    }
}

impl Element {
    /// Whether `found` is the element but for rounding: of operands to 10 bits, of partial sums, of the
    /// result.
    fn is(&self, found: f64, number: Number) -> bool {
        let overflows = number == Number::F16 && self.sum.abs() > 60_000.0;
        overflows || (found - self.sum).abs() <= 0.02 * self.sum.abs() + 0.1 * self.spread
    }
}

fn value(number: Number, bytes: &[u8]) -> f64 {
    fn sized<const N: usize>(bytes: &[u8]) -> [u8; N] {
        std::array::from_fn(|at| bytes[at])
    }
    match number {
        Number::F64 => f64::from_ne_bytes(sized(bytes)),
        Number::F32 => f32::from_ne_bytes(sized(bytes)).into(),
        Number::F16 => half::f16::from_ne_bytes(sized(bytes)).into(),
        Number::Bf16 => half::bf16::from_ne_bytes(sized(bytes)).into(),
    }
}

/// Index number `number` of those that are looked at: the first, the last, and some between.
fn place(number: usize, extents: &[i64]) -> Vec<i64> {
    let along = |(axis, &extent): (usize, &i64)| match number {
        0 => 0,
        1 => extent - 1,
        _ => {
            let drawn = (number as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (7 * axis + 3);
            (drawn % extent.max(1) as u64) as i64
        }
    };
    extents.iter().enumerate().map(along).collect()
}

fn offset(tensor: &Tensor, index: &[i64]) -> usize {
    let along = index
        .iter()
        .zip(&tensor.strides)
        .map(|(index, stride)| index * stride);
    along.sum::<i64>() as usize
}

/// Calls `take` with the places of both operands, in elements, of each product that element `index` of the
/// result is the sum of.
fn products(convolution: &Convolution, index: &[i64], mut take: impl FnMut(usize, usize)) {
    let Convolution {
        x,
        w,
        y,
        stride,
        dilation,
        low,
        ..
    } = convolution;
    let axes = stride.len();
    let groups = convolution.groups().max(1);
    let (inside, outside) = (w.extents[1], w.extents[0] / groups);
    // Where in the image element `k` of the window is read for pixel `p` of the result, if it is not padding.
    let read = |axis: usize, p: i64, k: i64| {
        let at = p * stride[axis] + k * dilation[axis] - low[axis];
        (0..x.extents[2 + axis]).contains(&at).then_some(at)
    };
    let spatial = &index[2..];
    let mut at = vec![0; 2 + axes];
    match convolution.task {
        Task::Forward => {
            let (n, o) = (index[0], index[1]);
            each(inside, &w.extents[2..], |c, k| {
                (at[0], at[1]) = (n, o / outside * inside + c);
                let places = (0..axes).map(|axis| read(axis, spatial[axis], k[axis]));
                if fill(&mut at[2..], places) {
                    take(offset(x, &at), offset(w, &whole(o, c, k)));
                }
            });
        }
        Task::InputGradient => {
            let (n, group, c) = (index[0], index[1] / inside, index[1] % inside);
            each(outside, &w.extents[2..], |o, k| {
                let o = group * outside + o;
                (at[0], at[1]) = (n, o);
                let places = (0..axes).map(|axis| {
                    let steps = spatial[axis] + low[axis] - k[axis] * dilation[axis];
                    let p = steps / stride[axis];
                    (steps % stride[axis] == 0 && (0..y.extents[2 + axis]).contains(&p) && steps >= 0)
                        .then_some(p)
                });
                if fill(&mut at[2..], places) {
                    take(offset(y, &at), offset(w, &whole(o, c, k)));
                }
            });
        }
        Task::WeightGradient => {
            let (o, c) = (index[0], index[1]);
            each(x.extents[0], &y.extents[2..], |n, p| {
                (at[0], at[1]) = (n, o / outside * inside + c);
                let places = (0..axes).map(|axis| read(axis, p[axis], spatial[axis]));
                if fill(&mut at[2..], places) {
                    take(offset(x, &at), offset(y, &whole(n, o, p)));
                }
            });
        }
    }
}

fn whole(first: i64, second: i64, spatial: &[i64]) -> Vec<i64> {
    [&[first, second], spatial].concat()
}

/// Fills in the places; false if one is none.
fn fill(at: &mut [i64], places: impl Iterator<Item = Option<i64>>) -> bool {
    at.iter_mut().zip(places).all(|(at, place)| match place {
        Some(place) => {
            *at = place;
            true
        }
        None => false,
    })
}

/// Calls `body` with each number below `outer` and each index within `extents`.
fn each(outer: i64, extents: &[i64], mut body: impl FnMut(i64, &[i64])) {
    let inner: i64 = extents.iter().product();
    let mut index = vec![0; extents.len()];
    for number in 0..outer {
        index.fill(0);
        for _ in 0..inner {
            body(number, &index);
            for (at, &extent) in index.iter_mut().zip(extents).rev() {
                *at += 1;
                if *at < extent {
                    break;
                }
                *at = 0;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each of the three tasks is the same sum of products, seen from another tensor.
    #[test]
    fn all_tasks_have_the_same_products() {
        let tensor = |extents: [i64; 4]| Tensor {
            number: Number::F32,
            strides: vec![
                extents[1] * extents[2] * extents[3],
                extents[2] * extents[3],
                extents[3],
                1,
            ],
            extents: extents.to_vec(),
        };
        let of_task = |task| {
            let convolution = Convolution {
                task,
                x: tensor([2, 4, 7, 5]),
                w: tensor([6, 2, 3, 2]),
                y: tensor([2, 6, 3, 4]),
                stride: vec![3, 2],
                dilation: vec![1, 3],
                low: vec![1, 2],
                high: vec![2, 4],
                tf32: false,
            };
            let result = convolution.tensors()[2].clone();
            let mut all = Vec::new();
            each(result.extents[0], &result.extents[1..], |first, rest| {
                let index = whole(first, rest[0], &rest[1..]);
                let own = offset(&result, &index);
                products(&convolution, &index, |a, b| {
                    all.push(match task {
                        Task::Forward => [a, b, own],
                        Task::InputGradient => [own, b, a],
                        Task::WeightGradient => [a, own, b],
                    });
                });
            });
            all.sort_unstable();
            all
        };
        let forward = of_task(Task::Forward);
        assert!(forward.len() > 100);
        assert_eq!(forward, of_task(Task::InputGradient));
        assert_eq!(forward, of_task(Task::WeightGradient));
    }
}
