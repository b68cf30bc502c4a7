//! Whether a plan computes what was asked for.
//!
//! One of cuDNN 9's engines gives wrong weight gradients of f32 where a window with gaps has strides, or
//! where single elements have padding. The heuristic names it second or third, and now and then it is the
//! fastest. So a plan's result is compared with plain sums, at some of its elements, before the plan may be
//! chosen.
//!
//! An element of the result is a sum over axes: channels or images, and the window's elements or pixels.
//! Along each axis both operands are read at places that belong together. In one dimension, for pixel 0 of a
//! result whose window of three has a stride of one and one zero in front, these are
//!
//! ```text
//!    image     (padding)   0   1      channels   0   1   2 ..
//!    window        0       1   2                 0   1   2 ..
//! ```
//!
//! The element is the sum of the products of all pairs of the one axis with all pairs of the other.

use super::convolution::{Convolution, Task, Tensor};
use super::run::ConvolutionArguments;
use crate::error::Result;
use crate::products::{BLOCK, NANS, Number, Operand, Place, block};
use crate::runtime::Stream;

/// Products that the plain sums should have together.
const PRODUCTS: usize = 256 << 10;

/// Elements that are looked at however deep their sums are.
const LEAST: usize = 9;

/// Spatial places that are all looked at: those of a window of three by three by three, or of five by five.
const FEW: i64 = 27;

/// Results of so many bytes are read as a whole.
const SMALL: usize = 1 << 20;

/// Bytes on either side of a result that a plan must not write: those that a tile of it would reach.
const BESIDE: usize = 16 << 10;

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
    /// How far from the sum a right result may be.
    tolerance: f64,
}

impl Check {
    /// For operands that [`crate::products::random_for`] has filled.
    pub(super) fn new(convolution: &Convolution) -> Self {
        let [first, second, result] = convolution.tensors();
        let numbers = [
            Numbers::new(first, Operand::First),
            Numbers::new(second, Operand::Second),
        ];
        let rounding = Rounding::of(convolution);
        let elements = indices(convolution).into_iter().map(|index| {
            let (mut sum, mut squares, mut depth) = (0.0, 0.0, 0.0);
            products(convolution, &index, |a, b| {
                let product = numbers[0].at(a) * numbers[1].at(b);
                sum += product;
                squares += product * product;
                depth += 1.0;
            });
            Element {
                at: offset(result, &index),
                sum,
                tolerance: rounding.tolerance(sum, f64::sqrt(squares), depth),
            }
        });
        Self {
            elements: elements.collect(),
            number: result.number,
            bytes: result.bytes(),
        }
    }

    /// Whether `run`, which queues a plan on these arguments, leaves the right elements, and nothing beside
    /// its result. There are [`super::search::MARGIN`] bytes on either side of each tensor.
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
            stream.fill(storage, start + at..start + at + bytes, NANS)?;
        }
        let beside = [start - BESIDE, start + self.bytes];
        for at in beside {
            stream.fill(storage, at..at + BESIDE, NANS)?;
        }
        // Nor may an engine count on zeros to work in.
        if let Some((workspace, start)) = arguments.workspace {
            stream.fill(workspace, start..workspace.bytes(), NANS)?;
        }
        run()?;
        for at in beside {
            let mut untouched = vec![0; BESIDE];
            stream.read(storage, at, &mut untouched)?;
            if untouched.iter().any(|&byte| byte != NANS) {
                return Ok(false);
            }
        }
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
    /// Whether `found` is the element but for rounding.
    fn is(&self, found: f64, number: Number) -> bool {
        // The largest number of 16 bits is 65,504: what is close to it may be infinite after rounding.
        if number == Number::F16 && self.sum.abs() > 60_000.0 {
            return found.abs() > 58_000.0 && found.signum() == self.sum.signum();
        }
        (found - self.sum).abs() <= self.tolerance
    }
}

/// What an engine may round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rounding {
    /// Only sums, to the next number of f32.
    Sums,
    /// Operands to 10 bits of fraction, the result to 7, and sums as tensor cores do.
    TensorCores,
}

impl Rounding {
    fn of(convolution: &Convolution) -> Self {
        let is_wide = |tensor: &Tensor| matches!(tensor.number, Number::F32 | Number::F64);
        match !convolution.tf32 && convolution.tensors().into_iter().all(is_wide) {
            true => Self::Sums,
            false => Self::TensorCores,
        }
    }

    /// How far from `sum`, of `depth` products, a right result may be. `spread` is the root of the sum of the
    /// products' squares: signs are random, so partial sums are about as large, or smaller.
    ///
    /// Rounded to the next number, partial sums are off by up to 2^-24 of themselves in either direction. All
    /// of them together are off by about 2^-25 sqrt(depth) spreads: simulated, at most 3e-4 of a spread for
    /// 2^24 products.
    ///
    /// Tensor cores round operands of f32 towards zero, which takes up to 2^-9 of each product. The result is
    /// rounded to 2^-8 of itself at most. Tensor cores also cut their sums off, one for four products or
    /// more, by up to 2^-23 of a sum that keeps its sign for long: together by 2^-25 depth spreads at most.
    /// Simulated, that is at most 0.016 of a spread for 2^20 products and 0.26 for 2^24.
    fn tolerance(self, sum: f64, spread: f64, depth: f64) -> f64 {
        match self {
            Self::Sums => 1e-3 * (sum.abs() + spread),
            Self::TensorCores => 0.02 * sum.abs() + (0.01 + depth / f64::from(1 << 25)) * spread,
        }
    }
}

/// The numbers of an operand that [`crate::products::random_for`] has filled.
struct Numbers {
    number: Number,
    block: &'static [u8],
}

impl Numbers {
    fn new(operand: &Tensor, which: Operand) -> Self {
        Self {
            number: operand.number,
            block: block(operand.number, which),
        }
    }

    /// The number at a place, in elements.
    fn at(&self, at: usize) -> f64 {
        let size = self.number.bytes();
        value(self.number, &self.block[at * size % BLOCK..][..size])
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

/// The result's elements that are looked at. Each of [`landmarks`] is among their spatial places; others are
/// drawn, as their images and channels are. The first and the last element are among them, too.
fn indices(convolution: &Convolution) -> Vec<Vec<i64>> {
    let result = convolution.tensors()[2];
    let depth = (convolution.multiplications() / result.elements().max(1) as f64).max(1.0);
    let most = if result.bytes() <= SMALL { 64 } else { 16 };
    let landmarks = landmarks(&result.extents[2..]);
    let count = ((PRODUCTS as f64 / depth) as usize)
        .clamp(LEAST, most)
        .max(landmarks.len());
    let index = |number: usize| {
        let landmark = landmarks.get(number);
        let along = |(axis, &extent): (usize, &i64)| match (number, landmark) {
            (_, Some(landmark)) if axis >= 2 => landmark[axis - 2],
            (0, _) => 0,
            (1, _) => extent - 1,
            _ => {
                let drawn = (number as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (7 * axis + 3);
                (drawn % extent.max(1) as u64) as i64
            }
        };
        result.extents.iter().enumerate().map(along).collect()
    };
    (0..count).map(index).collect()
}

/// Spatial places that every check looks at: all if they are few, such as the elements of a window. Of others
/// those that are first, last or in the middle along each axis: where there is padding in front, behind, or
/// none. The first place and the last come first.
fn landmarks(extents: &[i64]) -> Vec<Vec<i64>> {
    let are_few = extents.iter().product::<i64>() <= FEW;
    let along = |&extent: &i64| -> Vec<i64> {
        let mut places = match are_few {
            true => (0..extent).collect(),
            false => vec![0, extent / 2, extent - 1],
        };
        places.dedup();
        places
    };
    let mut all = vec![Vec::new()];
    for places in extents.iter().map(along) {
        let longer = |begun: &Vec<i64>| -> Vec<Vec<i64>> {
            let place = |&place: &i64| [&begun[..], &[place]].concat();
            places.iter().map(place).collect()
        };
        all = all.iter().flat_map(longer).collect();
    }
    if all.len() > 2 {
        let last = all.len() - 1;
        all.swap(1, last);
    }
    all
}

fn offset(tensor: &Tensor, index: &[i64]) -> usize {
    let along = index
        .iter()
        .zip(&tensor.strides)
        .map(|(index, stride)| index * stride);
    along.sum::<i64>() as usize
}

/// Steps that belong together, in elements of both operands.
type Pair = [i64; 2];

/// Calls `take` with the places of both operands, in elements, of each product that element `index` of the
/// result is the sum of.
fn products(convolution: &Convolution, index: &[i64], mut take: impl FnMut(usize, usize)) {
    let (start, axes) = summed(convolution, index);
    each(&axes, start, &mut |[first, second]| {
        take(first as usize, second as usize)
    });
}

/// The places from which both operands are read for element `index` of the result, and the pairs along each
/// axis of its sum.
fn summed(convolution: &Convolution, index: &[i64]) -> (Pair, Vec<Vec<Pair>>) {
    let Convolution {
        x,
        w,
        y,
        stride,
        dilation,
        low,
        ..
    } = convolution;
    let groups = convolution.groups().max(1);
    let (inside, outside) = (w.extents[1], w.extents[0] / groups);
    // Where in the image element `k` of the window is read for pixel `p` of the result, if it is not padding.
    let read = |axis: usize, p: i64, k: i64| {
        let at = p * stride[axis] + k * dilation[axis] - low[axis];
        (0..x.extents[2 + axis]).contains(&at).then_some(at)
    };
    // The pixel of the result for which pixel `at` of the image is read by element `k` of the window.
    let read_for = |axis: usize, at: i64, k: i64| {
        let steps = at + low[axis] - k * dilation[axis];
        let p = steps / stride[axis];
        (steps >= 0 && steps % stride[axis] == 0 && p < y.extents[2 + axis]).then_some(p)
    };
    let (x_step, w_step, y_step) = (&x.strides[..], &w.strides[..], &y.strides[..]);
    let spatial = 0..stride.len();
    let window = |axis: usize| 0..w.extents[2 + axis];
    let (start, first): (Pair, Vec<Pair>) = match convolution.task {
        Task::Forward => {
            let (n, o) = (index[0], index[1]);
            let channel = o / outside * inside;
            let along = |c| [c * x_step[1], c * w_step[1]];
            (
                [n * x_step[0] + channel * x_step[1], o * w_step[0]],
                (0..inside).map(along).collect(),
            )
        }
        Task::InputGradient => {
            let (n, group, c) = (index[0], index[1] / inside, index[1] % inside);
            let channel = group * outside;
            let along = |o| [o * y_step[1], o * w_step[0]];
            (
                [
                    n * y_step[0] + channel * y_step[1],
                    channel * w_step[0] + c * w_step[1],
                ],
                (0..outside).map(along).collect(),
            )
        }
        Task::WeightGradient => {
            let (o, c) = (index[0], index[1]);
            let along = |n| [n * x_step[0], n * y_step[0]];
            (
                [(o / outside * inside + c) * x_step[1], o * y_step[1]],
                (0..x.extents[0]).map(along).collect(),
            )
        }
    };
    let along = |axis: usize| -> Vec<Pair> {
        let own = index[2 + axis];
        let [x_step, w_step, y_step] = [x_step, w_step, y_step].map(|steps| steps[2 + axis]);
        match convolution.task {
            Task::Forward => window(axis)
                .filter_map(|k| Some([read(axis, own, k)? * x_step, k * w_step]))
                .collect(),
            Task::InputGradient => window(axis)
                .filter_map(|k| Some([read_for(axis, own, k)? * y_step, k * w_step]))
                .collect(),
            Task::WeightGradient => (0..y.extents[2 + axis])
                .filter_map(|p| Some([read(axis, p, own)? * x_step, p * y_step]))
                .collect(),
        }
    };
    (start, std::iter::once(first).chain(spatial.map(along)).collect())
}

/// Calls `take` with each sum of `start` and a pair of each axis.
fn each(axes: &[Vec<Pair>], start: Pair, take: &mut impl FnMut(Pair)) {
    let [axis, others @ ..] = axes else {
        return take(start);
    };
    for pair in axis {
        let start = [start[0] + pair[0], start[1] + pair[1]];
        match others {
            [] => take(start),
            others => each(others, start, take),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::search::Trial;
    use super::*;
    use crate::runtime::Device;
    use crate::testing::FakeDriver;

    fn tensor(number: Number, extents: [i64; 4]) -> Tensor {
        Tensor {
            number,
            strides: vec![
                extents[1] * extents[2] * extents[3],
                extents[2] * extents[3],
                extents[3],
                1,
            ],
            extents: extents.to_vec(),
        }
    }

    /// One whose window moves by single steps, with a margin that keeps the size of the image.
    fn same(
        task: Task,
        number: Number,
        [n, inside, outside]: [i64; 3],
        size: i64,
        window: i64,
    ) -> Convolution {
        Convolution {
            task,
            x: tensor(number, [n, inside, size, size]),
            w: tensor(number, [outside, inside, window, window]),
            y: tensor(number, [n, outside, size, size]),
            stride: vec![1; 2],
            dilation: vec![1; 2],
            low: vec![window / 2; 2],
            high: vec![window / 2; 2],
            tf32: false,
        }
    }

    /// The products of element `index` of the result, in order.
    fn factors(convolution: &Convolution, index: &[i64]) -> Vec<[f64; 2]> {
        let [first, second, _] = convolution.tensors();
        let (first, second) = (
            Numbers::new(first, Operand::First),
            Numbers::new(second, Operand::Second),
        );
        let mut all = Vec::new();
        products(convolution, index, |a, b| all.push([first.at(a), second.at(b)]));
        all
    }

    fn sum(factors: &[[f64; 2]]) -> f64 {
        factors.iter().map(|[a, b]| a * b).sum()
    }

    /// Whether a plan passes that computes `found` for an element.
    fn passes(convolution: &Convolution, found: impl Fn(&[i64]) -> f64) -> bool {
        let check = Check::new(convolution);
        let all = indices(convolution);
        assert_eq!(all.len(), check.elements.len());
        let is_right = |(element, index): (&Element, &Vec<i64>)| element.is(found(index), check.number);
        check.elements.iter().zip(&all).all(is_right)
    }

    /// A plan that writes the right elements is right, unless it writes beside its result, too. It finds NaNs
    /// around its operands, in its result and where it works.
    #[test]
    fn a_plan_is_tried_between_nans() {
        let fake = FakeDriver::start(1, 64 << 20).unwrap();
        let stream = Device::open(fake.driver(), 0).unwrap().stream().unwrap();
        let convolution = same(Task::Forward, Number::F32, [1, 3, 2], 5, 3);
        let trial = Trial::new(&stream, &convolution, 256).unwrap();
        let arguments = trial.arguments();
        let check = Check::new(&convolution);
        let (y, start) = arguments.y;
        let end = start + convolution.y.bytes();
        let write = |at: usize, number: f32| stream.write(&number.to_ne_bytes(), y, at);
        let are_nans = |(storage, at): Place<'_>, bytes: usize| {
            let mut found = vec![0; bytes];
            stream.read(storage, at, &mut found).unwrap();
            found.iter().all(|&byte| byte == NANS)
        };
        let passes = |beside: Option<usize>| {
            let run = || {
                assert!(are_nans(arguments.workspace.unwrap(), 256) && are_nans(arguments.y, end - start));
                for (tensor, (storage, at)) in [(&convolution.x, arguments.x), (&convolution.w, arguments.w)]
                {
                    assert!(are_nans((storage, at - 4096), 4096));
                    assert!(are_nans((storage, at + tensor.bytes()), 4096));
                    assert!(!are_nans((storage, at), tensor.bytes()));
                }
                for element in &check.elements {
                    write(start + 4 * element.at, element.sum as f32)?;
                }
                beside.map_or(Ok(()), |at| write(at, 1.0))
            };
            check.passes(&stream, Task::Forward, &arguments, run).unwrap()
        };
        assert!(passes(None));
        assert!(!passes(Some(start - 4)) && !passes(Some(end)));
        assert!(passes(None), "what one has written does not count for the next");
        assert!(!passes(Some(start)), "a wrong element");
    }

    /// Each of the three tasks is the same sum of products, seen from another tensor.
    #[test]
    fn all_tasks_have_the_same_products() {
        let of_task = |task| {
            let convolution = Convolution {
                task,
                x: tensor(Number::F32, [2, 4, 7, 5]),
                w: tensor(Number::F32, [6, 2, 3, 2]),
                y: tensor(Number::F32, [2, 6, 3, 4]),
                stride: vec![3, 2],
                dilation: vec![1, 3],
                low: vec![1, 2],
                high: vec![2, 4],
                tf32: false,
            };
            let result = convolution.tensors()[2].clone();
            let mut all = Vec::new();
            for number in 0..result.elements() as i64 {
                let along = |(extent, stride): (&i64, &i64)| number / stride % extent;
                let index: Vec<i64> = result.extents.iter().zip(&result.strides).map(along).collect();
                let own = offset(&result, &index);
                products(&convolution, &index, |a, b| {
                    all.push(match task {
                        Task::Forward => [a, b, own],
                        Task::InputGradient => [own, b, a],
                        Task::WeightGradient => [a, own, b],
                    });
                });
            }
            all.sort_unstable();
            all
        };
        let forward = of_task(Task::Forward);
        assert!(forward.len() > 100);
        assert_eq!(forward, of_task(Task::InputGradient));
        assert_eq!(forward, of_task(Task::WeightGradient));
    }

    #[test]
    fn all_elements_of_a_small_window_are_looked_at() {
        let spatial = |convolution: &Convolution| {
            let all = indices(convolution).into_iter();
            let mut places: Vec<[i64; 2]> = all.map(|index| [index[2], index[3]]).collect();
            assert!(places.len() >= LEAST);
            places.sort_unstable();
            places.dedup();
            places
        };
        // As deep as the gradients of a network's first layers.
        let gradient = |window| same(Task::WeightGradient, Number::F32, [64, 8, 16], 112, window);
        assert_eq!(spatial(&gradient(1)), [[0, 0]]);
        assert_eq!(spatial(&gradient(3)).len(), 9);
        assert_eq!(spatial(&gradient(5)).len(), 25);
        let of_seven = spatial(&gradient(7));
        let pixels = spatial(&same(Task::Forward, Number::F32, [64, 512, 512], 112, 3));
        for corner in [[0, 0], [0, 1], [1, 0], [1, 1]] {
            assert!(of_seven.contains(&corner.map(|at| 6 * at)), "{of_seven:?}");
            assert!(pixels.contains(&corner.map(|at| 111 * at)), "{pixels:?}");
        }
    }

    /// Errors of few elements, and small ones: others are seen wherever one looks.
    #[test]
    fn wrong_results_do_not_pass() {
        let refused = |what: &str, right: &Convolution, wrong: &dyn Fn(&[i64]) -> f64| {
            assert!(passes(right, |index| sum(&factors(right, index))), "{what}");
            assert!(!passes(right, wrong), "{what}");
        };
        // Images of 1 MiB, of which one is read twice.
        let right = same(Task::WeightGradient, Number::F32, [2, 1, 1], 512, 3);
        let mut first_again = right.clone();
        first_again.x.strides[0] = 0;
        refused("images", &right, &|index| sum(&factors(&first_again, index)));
        // The last row of pixels is left out.
        for (number, tf32) in [(Number::F32, false), (Number::F32, true), (Number::Bf16, false)] {
            let right = Convolution {
                tf32,
                ..same(Task::WeightGradient, number, [1, 2, 2], 256, 3)
            };
            let mut short = right.clone();
            short.y.extents[2] -= 1;
            refused("rows", &right, &|index| sum(&factors(&short, index)));
        }
        // One corner of the window is that of another one.
        let right = same(Task::WeightGradient, Number::F32, [1, 2, 2], 256, 3);
        refused("a corner", &right, &|index| {
            let mut index = index.to_vec();
            if index[2..] == [0, 2] {
                index[3] = 0;
            }
            sum(&factors(&right, &index))
        });
        // Padding that is not of zeros, but of the pixel beside it.
        let right = same(Task::Forward, Number::F32, [1, 64, 64], 56, 3);
        refused("padding", &right, &|index| {
            let beside = index.iter().enumerate();
            let beside: Vec<i64> = beside
                .map(|(axis, &at)| if axis == 3 && at == 55 { 54 } else { at })
                .collect();
            sum(&factors(&right, &beside))
        });
        // The operands are exchanged: the result of pixels alone is transposed.
        let right = same(Task::WeightGradient, Number::F32, [1, 8, 8], 64, 1);
        refused("operands", &right, &|index| {
            sum(&factors(&right, &[index[1], index[0], 0, 0]))
        });
        refused("nothing", &right, &|_| f64::NAN);
    }

    /// As engines round: operands, sums, partial sums of many blocks, the result.
    #[test]
    fn rounded_results_pass() {
        // To f32, towards zero.
        let cut = |exact: f64| {
            let near = exact as f32;
            let beyond = f64::from(near).abs() > exact.abs();
            f64::from(f32::from_bits(near.to_bits() - u32::from(beyond)))
        };
        let tf32 = |x: f64| f64::from(f32::from_bits((x as f32).to_bits() & !0x1fff));
        let bf16 = |x: f64| f64::from(f32::from_bits((x as f32).to_bits() & !0xffff));
        for task in [Task::Forward, Task::InputGradient, Task::WeightGradient] {
            let deep = task == Task::WeightGradient;
            let (channels, size) = if deep {
                ([2, 1, 1], 256)
            } else {
                ([1, 256, 256], 8)
            };
            let plain = same(task, Number::F32, channels, size, 3);
            let right = passes(&plain, |index| {
                let add = |sum: f32, [a, b]: &[f64; 2]| (f64::from(sum) + a * b) as f32;
                factors(&plain, index).iter().fold(0.0, add).into()
            });
            assert!(right, "{plain}");
            for number in [Number::F32, Number::Bf16] {
                let rounded = Convolution {
                    tf32: true,
                    ..same(task, number, channels, size, 3)
                };
                let factors = |index: &[i64]| factors(&rounded, index);
                // Four products at a time are added exactly, and the sum is cut off.
                let add = |begun: f64, four: &[[f64; 2]]| {
                    let four: f64 = four.iter().map(|[a, b]| tf32(*a) * tf32(*b)).sum();
                    cut(begun + four)
                };
                let stored = |sum: f64| if number == Number::Bf16 { bf16(sum) } else { sum };
                let whole = |index: &[i64]| stored(factors(index).chunks(4).fold(0.0, add));
                assert!(passes(&rounded, whole), "{rounded}");
                let split = |index: &[i64]| {
                    let all = factors(index);
                    let blocks = all.chunks(all.len().div_ceil(16).next_multiple_of(4));
                    stored(blocks.map(|block| stored(block.chunks(4).fold(0.0, add))).sum())
                };
                assert!(passes(&rounded, split), "{rounded} in parts");
            }
        }
    }

    #[test]
    fn numbers_too_large_for_sixteen_bits_are_infinite() {
        let element = |sum| Element {
            at: 0,
            sum,
            tolerance: 0.02 * f64::abs(sum),
        };
        for (sum, sign) in [(70_000.0, 1.0), (-70_000.0, -1.0)] {
            let is = |found: f64| element(sum).is(sign * found, Number::F16);
            assert!(is(f64::INFINITY) && is(65_504.0) && is(59_000.0));
            assert!(!is(f64::NEG_INFINITY) && !is(f64::NAN) && !is(0.0) && !is(50_000.0) && !is(-65_504.0));
        }
        assert!(!element(100.0).is(f64::INFINITY, Number::F16));
        assert!(!element(70_000.0).is(f64::INFINITY, Number::Bf16));
    }
}
