//! What a convolution computes.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::products::Number;

/// Which of the three tensors of a convolution is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Task {
    /// `y`, from `x` and `w`.
    Forward,
    /// The gradient of `x`, from that of `y` and `w`. A transposed convolution is one.
    InputGradient,
    /// The gradient of `w`, from `x` and the gradient of `y`.
    WeightGradient,
}

/// A tensor in memory. Its first element is aligned to 16 bytes.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Tensor {
    /// Type of the elements.
    pub number: Number,
    /// Extents: images, channels, then two or three spatial dimensions.
    pub extents: Vec<i64>,
    /// Elements between neighbours in each dimension.
    pub strides: Vec<i64>,
}

impl Tensor {
    /// Bytes from the first element to the end of the last.
    pub fn bytes(&self) -> usize {
        let last: i64 = self
            .extents
            .iter()
            .zip(&self.strides)
            .map(|(extent, stride)| (extent - 1) * stride)
            .sum();
        usize::try_from(last + 1).unwrap_or(0) * self.number.bytes()
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.extents
            .iter()
            .map(|&extent| usize::try_from(extent).unwrap_or(0))
            .product()
    }
}

impl fmt::Display for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let extents: Vec<String> = self.extents.iter().map(i64::to_string).collect();
        write!(f, "{}[{}]", self.number, extents.join("x"))
    }
}

/// A convolution, or one of its gradients. Sums are in f32.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Convolution {
    /// What is computed.
    pub task: Task,
    /// The image, or its gradient.
    pub x: Tensor,
    /// The weight, or its gradient: channels of `y`, channels of one group of `x`, the window.
    pub w: Tensor,
    /// The result, or its gradient.
    pub y: Tensor,
    /// Steps of the window, for each spatial dimension of the tensors.
    pub stride: Vec<i64>,
    /// Distance of the window's elements.
    pub dilation: Vec<i64>,
    /// Zeros in front of the image.
    pub low: Vec<i64>,
    /// Zeros behind the image.
    pub high: Vec<i64>,
    /// Whether operands of f32 may be rounded to 10 bits of fraction for the tensor cores.
    pub tf32: bool,
}

impl Convolution {
    /// The two operands, then the result.
    pub fn tensors(&self) -> [&Tensor; 3] {
        match self.task {
            Task::Forward => [&self.x, &self.w, &self.y],
            Task::InputGradient => [&self.y, &self.w, &self.x],
            Task::WeightGradient => [&self.x, &self.y, &self.w],
        }
    }

    /// Groups of channels.
    pub fn groups(&self) -> i64 {
        self.x.extents[1] / self.w.extents[1].max(1)
    }

    /// Whether a group's channels of one of the images are no whole vectors of 16 bytes.
    pub(super) fn is_narrow(&self) -> bool {
        let groups = self.groups().max(1);
        let is_whole = |image: &Tensor| {
            let channels = usize::try_from(image.extents[1] / groups).unwrap_or(0);
            (channels * image.number.bytes()).is_multiple_of(16)
        };
        !(is_whole(&self.x) && is_whole(&self.y))
    }

    /// Multiplications, each with an addition.
    pub fn multiplications(&self) -> f64 {
        let window: usize = self.w.elements() / usize::try_from(self.w.extents[0]).unwrap_or(1).max(1);
        self.y.elements() as f64 * window as f64
    }
}

impl fmt::Display for Convolution {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [first, second, result] = self.tensors();
        let what = match self.task {
            Task::Forward => "convolution",
            Task::InputGradient => "input gradient",
            Task::WeightGradient => "weight gradient",
        };
        write!(f, "{what} {first} * {second} -> {result}")?;
        let list = |numbers: &[i64]| {
            let numbers: Vec<String> = numbers.iter().map(i64::to_string).collect();
            numbers.join("x")
        };
        if self.stride.iter().any(|&stride| stride != 1) {
            write!(f, " stride {}", list(&self.stride))?;
        }
        if self.dilation.iter().any(|&dilation| dilation != 1) {
            write!(f, " dilation {}", list(&self.dilation))?;
        }
        if self.tf32 {
            f.write_str(" in TF32")?;
        }
        Ok(())
    }
}
