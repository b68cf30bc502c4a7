//! How the attributes of each operation appear in the text form: one table, which printer and parser share.
//!
//! A line of the table is `Variant "mnemonic" { mode member: name, .. }`. The member is the field of the
//! variant (`0` for tuple variants), the name is the key in the text. The mode says where the attribute
//! stands:
//!
//! - `word`: bare, before the operands;
//! - `key`: `name=value` in braces;
//! - `opt`: the same, left out when it equals the default;
//! - `result`: nowhere, it follows from the result types;
//! - `index_type`: nowhere, it is the element type of the second result;
//! - `fields`: the members of a struct, each with a mode of its own ([`fields!`]).
//!
//! Each mode is a method of [`Writer`] (printing) and of [`Statement`] (parsing).

use smallvec::SmallVec;

use super::parse::{Fault, Raw, Statement};
use super::print::{Writer, quoted};
use crate::op::{
    ArgReduceOp, AttentionDims, BinaryOp, CompareOp, ConvDims, Dims, DotDims, ExternOp, Op, RandomKind,
    ReduceOp, ScatterMode, SignedDims, UnaryOp, Window,
};
use crate::{Collective, CollectiveKind, DType, Scalar, Shape, TensorType};

macro_rules! forms {
    ($($variant:ident $mnemonic:literal { $($mode:ident $member:tt: $name:ident),* })*) => {
        /// The mnemonic of an operation.
        pub(crate) fn mnemonic(op: &Op) -> &'static str {
            match op {
                Op::Unary(op) => op.name(),
                Op::Binary(op) => op.name(),
                Op::Collective(collective) => collective.kind.name(),
                $(Op::$variant { .. } => $mnemonic,)*
            }
        }

        /// Hands the attributes of `op` to the writer.
        pub(super) fn write(op: &Op, out: &mut Writer) {
            match op {
                Op::Unary(_) | Op::Binary(_) => {}
                Op::Collective(collective) => collective.write(out),
                $(Op::$variant { $($member: $name),* } => { $(out.$mode(stringify!($name), $name);)* })*
            }
        }

        /// The operation of that mnemonic, its attributes taken from the statement.
        pub(super) fn read(mnemonic: &str, from: &mut Statement<'_>) -> Result<Op, Fault> {
            if let Some(op) = UnaryOp::from_name(mnemonic) {
                return Ok(Op::Unary(op));
            }
            if let Some(op) = BinaryOp::from_name(mnemonic) {
                return Ok(Op::Binary(op));
            }
            if let Some(kind) = CollectiveKind::from_name(mnemonic) {
                return Ok(Op::Collective(Collective { kind, ..Collective::read(from)? }));
            }
            match mnemonic {
                $($mnemonic => Ok(Op::$variant { $($member: from.$mode(stringify!($name))?),* }),)*
                _ => Err(from.fault(format!("unknown operation `{mnemonic}`"))),
            }
        }
    };
}

forms! {
    Parameter "parameter" { word index: index, result ty: ty, opt copy_of: copy_of }
    Scalar "scalar" { word index: index, result dtype: dtype }
    Constant "constant" { word value: value, result dtype: dtype }
    Iota "iota" { key axis: axis, result dtype: dtype, result shape: shape }
    Random "random" { word kind: kind, result dtype: dtype, result shape: shape }
    Compare "compare" { word 0: op }
    Select "select" {}
    Cast "cast" { result 0: dtype }
    Reduce "reduce" { word op: op, key axes: axes }
    ArgReduce "arg_reduce" { word op: op, key axis: axis, result dtype: dtype }
    Cumulative "cumulative" { word op: op, key axis: axis }
    Reshape "reshape" { result 0: shape }
    Transpose "transpose" { key 0: perm }
    Broadcast "broadcast" { result shape: shape, key dims: dims }
    Slice "slice" { key starts: starts, key limits: limits, key steps: steps }
    Pad "pad" { key low: low, key high: high }
    Concat "concat" { key axis: axis }
    Flip "flip" { key 0: axes }
    UpdateSlice "update_slice" { key starts: starts, key steps: steps }
    Gather "gather" { key axis: axis }
    Scatter "scatter" { word mode: mode, key axis: axis }
    IndexSelect "index_select" { key axis: axis }
    IndexPut "index_put" { word mode: mode, key axis: axis }
    DotGeneral "dot_general" { fields 0: dims }
    Conv "conv" { fields 0: conv }
    ConvInputGrad "conv_input_grad" { fields conv: conv, key input: input }
    ConvWeightGrad "conv_weight_grad" { fields conv: conv, key kernel: kernel }
    MaxPool "max_pool" { fields 0: window }
    MaxPoolWithIndices "max_pool_with_indices" { fields window: window, index_type dtype: dtype }
    MaxPoolGrad "max_pool_grad" { key input: input }
    AvgPool "avg_pool" { fields window: window, opt count_include_pad: count_include_pad }
    AvgPoolGrad "avg_pool_grad" { fields window: window, opt count_include_pad: count_include_pad, key input: input }
    Attention "attention" { fields 0: dims }
    AttentionGrad "attention_grad" { fields 0: dims }
    Sort "sort" { key axis: axis, opt descending: descending, index_type dtype: dtype }
    TopK "top_k" { key axis: axis, key k: k, index_type dtype: dtype }
    CollectiveWait "collective_wait" {}
    Extern "extern" { fields 0: op }
}

/// A struct of attributes whose members stand among those of the operation.
pub(super) trait Fields: Sized {
    fn write(&self, out: &mut Writer);
    fn read(from: &mut Statement<'_>) -> Result<Self, Fault>;
}

macro_rules! fields {
    ($($ty:ident { $($mode:ident $name:ident),* })*) => {$(
        impl Fields for $ty {
            fn write(&self, out: &mut Writer) {
                $(out.$mode(stringify!($name), &self.$name);)*
            }

            fn read(from: &mut Statement<'_>) -> Result<Self, Fault> {
                Ok(Self { $($name: from.$mode(stringify!($name))?),* })
            }
        }
    )*};
}

fields! {
    DotDims { opt a_batch, opt b_batch, opt a_contract, opt b_contract, opt result }
    ConvDims { key stride, key pad_low, key pad_high, key dilation, key groups, opt result }
    Window { key size, key stride, key pad_low, key pad_high, key dilation, opt ceil_mode }
    AttentionDims { opt causal, opt mask, opt hidden, opt mask_last, opt dropout, opt drop_scores, opt safe }
    ExternOp { word name, opt attributes, opt c_source, result outputs }
}

/// The kind is the mnemonic.
impl Fields for Collective {
    fn write(&self, out: &mut Writer) {
        out.key("ranks", &self.ranks);
        out.opt("mean", &self.mean);
        out.opt("root", &self.root);
        out.opt("started", &self.started);
    }

    fn read(from: &mut Statement<'_>) -> Result<Self, Fault> {
        Ok(Self {
            mean: from.opt("mean")?,
            root: from.opt("root")?,
            started: from.opt("started")?,
            ..Self::new(CollectiveKind::AllReduce, from.key("ranks")?)
        })
    }
}

impl<T: Fields> Fields for Box<T> {
    fn write(&self, out: &mut Writer) {
        T::write(self, out);
    }

    fn read(from: &mut Statement<'_>) -> Result<Self, Fault> {
        T::read(from).map(Box::new)
    }
}

/// An attribute value with a text of its own.
pub(super) trait Attribute: Sized {
    /// What the value is called in an error.
    const KIND: &'static str;
    fn write(&self, out: &mut String);
    fn read(raw: &Raw<'_>) -> Option<Self>;
}

macro_rules! atoms {
    ($($ty:ty: $kind:literal),*) => {$(
        impl Attribute for $ty {
            const KIND: &'static str = $kind;

            fn write(&self, out: &mut String) {
                out.push_str(&self.to_string());
            }

            fn read(raw: &Raw<'_>) -> Option<Self> {
                match raw {
                    Raw::Atom(text) => text.parse().ok(),
                    _ => None,
                }
            }
        }
    )*};
}

atoms!(usize: "a non-negative integer", u32: "a non-negative integer", bool: "true or false", Scalar: "a number");

macro_rules! named {
    ($($ty:ty: $kind:literal),*) => {$(
        impl Attribute for $ty {
            const KIND: &'static str = $kind;

            fn write(&self, out: &mut String) {
                out.push_str(self.name());
            }

            fn read(raw: &Raw<'_>) -> Option<Self> {
                match raw {
                    Raw::Atom(text) => Self::from_name(text),
                    _ => None,
                }
            }
        }
    )*};
}

named!(RandomKind: "a distribution", CompareOp: "a comparison", ReduceOp: "a reduction", ArgReduceOp: "max or min",
    ScatterMode: "a scatter mode");

macro_rules! lists {
    ($($ty:ty: $kind:literal),*) => {$(
        impl Attribute for $ty {
            const KIND: &'static str = $kind;

            fn write(&self, out: &mut String) {
                let entries: Vec<String> = self.iter().map(ToString::to_string).collect();
                out.push_str(&format!("[{}]", entries.join(",")));
            }

            fn read(raw: &Raw<'_>) -> Option<Self> {
                match raw {
                    Raw::List(entries) => entries.iter().map(|entry| entry.parse().ok()).collect(),
                    _ => None,
                }
            }
        }
    )*};
}

lists!(Dims: "a list of non-negative integers", SignedDims: "a list of integers");

impl Attribute for Option<DType> {
    const KIND: &'static str = "an element type";

    fn write(&self, out: &mut String) {
        if let Some(dtype) = self {
            out.push_str(dtype.name());
        }
    }

    fn read(raw: &Raw<'_>) -> Option<Self> {
        match raw {
            Raw::Atom(text) => text.parse().ok().map(Some),
            _ => None,
        }
    }
}

impl Attribute for Option<u32> {
    const KIND: &'static str = "a non-negative integer";

    fn write(&self, out: &mut String) {
        if let Some(number) = self {
            number.write(out);
        }
    }

    fn read(raw: &Raw<'_>) -> Option<Self> {
        u32::read(raw).map(Some)
    }
}

impl Attribute for String {
    const KIND: &'static str = "a quoted string";

    fn write(&self, out: &mut String) {
        out.push_str(&quoted(self));
    }

    fn read(raw: &Raw<'_>) -> Option<Self> {
        match raw {
            Raw::Text(text) => Some(text.clone()),
            _ => None,
        }
    }
}

/// An attribute that the result types say.
pub(super) trait FromResults: Sized {
    fn from_results(results: &[TensorType]) -> Option<Self>;
}

impl FromResults for TensorType {
    fn from_results(results: &[TensorType]) -> Option<Self> {
        results.first().cloned()
    }
}

impl FromResults for DType {
    fn from_results(results: &[TensorType]) -> Option<Self> {
        results.first().map(|ty| ty.dtype)
    }
}

impl FromResults for Shape {
    fn from_results(results: &[TensorType]) -> Option<Self> {
        results.first().map(|ty| ty.shape.clone())
    }
}

impl FromResults for SmallVec<[TensorType; 1]> {
    fn from_results(results: &[TensorType]) -> Option<Self> {
        Some(results.into())
    }
}
