//! The values of attributes: as words that are compared, and as text for people.

use burn_backend::tensor::IndexingUpdateOp;
use burn_backend::{Distribution, Slice};
use burn_ir::{GridSamplePaddingModeIr, InterpolateModeIr, ScalarIr};

use super::{Reader, Visit, Visitor};

impl<T: Visit> Visit for Box<T> {
    fn visit(&self, visitor: &mut dyn Visitor) {
        T::visit(self, visitor);
    }

    fn read(&self, name: &'static str, reader: &mut dyn Reader) {
        T::read(self, name, reader);
    }
}

impl Visit for usize {
    fn visit(&self, visitor: &mut dyn Visitor) {
        visitor.word(*self as u64);
    }
}

impl Visit for bool {
    fn visit(&self, visitor: &mut dyn Visitor) {
        visitor.word(u64::from(*self));
    }
}

impl Visit for isize {
    fn visit(&self, visitor: &mut dyn Visitor) {
        visitor.word(*self as u64);
    }
}

impl Visit for ScalarIr {
    fn visit(&self, visitor: &mut dyn Visitor) {
        visitor.scalar(*self);
    }

    fn read(&self, name: &'static str, reader: &mut dyn Reader) {
        reader.scalar(name, *self);
    }
}

/// `[1, 2, 3]`
fn list<T: Visit>(items: &[T]) -> String {
    let items: Vec<String> = items.iter().map(Visit::text).collect();
    format!("[{}]", items.join(", "))
}

impl<T: Visit, const N: usize> Visit for [T; N] {
    fn visit(&self, visitor: &mut dyn Visitor) {
        self.iter().for_each(|item| item.visit(visitor));
    }

    fn text(&self) -> String {
        list(self)
    }
}

impl<T: Visit> Visit for Vec<T> {
    fn visit(&self, visitor: &mut dyn Visitor) {
        visitor.word(self.len() as u64);
        self.iter().for_each(|item| item.visit(visitor));
    }

    fn text(&self) -> String {
        list(self)
    }
}

impl<T: Visit> Visit for Option<T> {
    fn visit(&self, visitor: &mut dyn Visitor) {
        visitor.word(u64::from(self.is_some()));
        self.iter().for_each(|item| item.visit(visitor));
    }

    fn text(&self) -> String {
        self.as_ref().map_or_else(|| "none".to_owned(), Visit::text)
    }

    fn read(&self, name: &'static str, reader: &mut dyn Reader) {
        match self {
            Some(part) => part.read(name, reader),
            None => reader.attribute(name, self.text()),
        }
    }
}

impl Visit for Slice {
    fn visit(&self, visitor: &mut dyn Visitor) {
        self.start.visit(visitor);
        self.end.visit(visitor);
        self.step.visit(visitor);
    }

    fn text(&self) -> String {
        self.to_string()
    }
}

impl Visit for IndexingUpdateOp {
    fn visit(&self, visitor: &mut dyn Visitor) {
        visitor.word(match self {
            IndexingUpdateOp::Assign => 0,
            IndexingUpdateOp::Add => 1,
            IndexingUpdateOp::Mul => 2,
            IndexingUpdateOp::Min => 3,
            IndexingUpdateOp::Max => 4,
        });
    }
}

impl Visit for InterpolateModeIr {
    fn visit(&self, visitor: &mut dyn Visitor) {
        visitor.word(match self {
            InterpolateModeIr::Nearest => 0,
            InterpolateModeIr::Bilinear => 1,
            InterpolateModeIr::Bicubic => 2,
            InterpolateModeIr::Lanczos3 => 3,
        });
    }
}

impl Visit for GridSamplePaddingModeIr {
    fn visit(&self, visitor: &mut dyn Visitor) {
        visitor.word(match self {
            GridSamplePaddingModeIr::Zeros => 0,
            GridSamplePaddingModeIr::Border => 1,
            GridSamplePaddingModeIr::Reflection => 2,
        });
    }
}

/// The kind is an attribute; the parameters are scalars.
impl Visit for Distribution {
    fn visit(&self, visitor: &mut dyn Visitor) {
        let (kind, parameters): (u64, &[f64]) = match self {
            Distribution::Default => (0, &[]),
            Distribution::Bernoulli(probability) => (1, &[*probability]),
            Distribution::Uniform(low, high) => (2, &[*low, *high]),
            Distribution::Normal(mean, deviation) => (3, &[*mean, *deviation]),
        };
        visitor.word(kind);
        parameters
            .iter()
            .for_each(|&parameter| visitor.scalar(ScalarIr::Float(parameter)));
    }

    fn text(&self) -> String {
        let kind = match self {
            Distribution::Default => "default",
            Distribution::Bernoulli(_) => "bernoulli",
            Distribution::Uniform(..) => "uniform",
            Distribution::Normal(..) => "normal",
        };
        kind.to_owned()
    }
}
