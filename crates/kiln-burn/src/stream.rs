//! Walking a recorded operation: its name, tensors, scalars and attributes, in one fixed order.
//!
//! `burn_ir::OperationIr` has some 250 variants over some 90 structs. Two users look at all of them without
//! distinguishing them: the guard, which turns a stream of operations into words that do not depend on
//! tensor ids ([`crate::record`]), and the binding of runtime scalars, which must find the k-th scalar of a
//! stream again at the next call. Both walk with [`walk`]; the order of visits *is* the order of scalars
//! that [`crate::import`] numbers.
//!
//! For people, [`read`] visits the same parts with their names.
//!
//! Which scalars are runtime arguments and which belong to the identity of the step is decided here, by
//! [`scalars_are_static`], for guard and import alike.

mod values;

use std::fmt::Debug;

use burn_backend::DType;
use burn_ir::*;
use kiln_graph::Scalar;

/// Receives the parts of an operation, in order.
pub trait Visitor {
    /// A tensor the operation reads.
    fn input(&mut self, tensor: &TensorIr);
    /// A tensor the operation defines.
    fn output(&mut self, tensor: &TensorIr);
    /// A scalar operand.
    fn scalar(&mut self, scalar: ScalarIr);
    /// An attribute, as a number.
    fn word(&mut self, word: u64);
}

/// Receives the parts of an operation with their names, in order: for people.
pub trait Reader {
    /// A tensor the operation reads.
    fn operand(&mut self, name: &'static str, tensor: &TensorIr);
    /// A tensor the operation defines.
    fn result(&mut self, name: &'static str, tensor: &TensorIr);
    /// A scalar operand.
    fn scalar(&mut self, name: &'static str, scalar: ScalarIr);
    /// An attribute, in words.
    fn attribute(&mut self, name: &'static str, text: String);
}

/// Parts of an operation that can be visited.
pub trait Visit: Debug {
    /// Visits the parts in order.
    fn visit(&self, visitor: &mut dyn Visitor);

    /// The value as people write it.
    fn text(&self) -> String {
        format!("{self:?}").to_lowercase()
    }

    /// Reads the parts in order. `name` is the name of a single value; parts of a structure have names of
    /// their own.
    fn read(&self, name: &'static str, reader: &mut dyn Reader) {
        reader.attribute(name, self.text());
    }
}

/// An operation taken apart: a code and a name for its kind, and its parts.
pub struct Described<'a> {
    /// Family, such as `NumericFloat`.
    pub family: &'static str,
    /// Variant, such as `Add`.
    pub variant: &'static str,
    /// Unique among all operations.
    pub code: u64,
    /// The element type the operation was issued for, where the stream carries one.
    pub dtype: Option<DType>,
    /// Operands, results and attributes.
    pub parts: &'a dyn Visit,
}

/// Takes an operation apart.
pub fn describe(operation: &OperationIr) -> Described<'_> {
    // Families have fewer than 2^8 variants each; the family is the byte above.
    fn of<'a>(
        family: &'static str,
        index: u64,
        dtype: Option<DType>,
        (code, variant, parts): Entry<'a>,
    ) -> Described<'a> {
        Described {
            family,
            variant,
            code: index << 8 | code,
            dtype,
            parts,
        }
    }
    match operation {
        OperationIr::BaseFloat(op) => of("BaseFloat", 0, None, op.entry()),
        OperationIr::BaseInt(op) => of("BaseInt", 1, None, op.entry()),
        OperationIr::BaseBool(op) => of("BaseBool", 2, None, op.entry()),
        OperationIr::NumericFloat(dtype, op) => of("NumericFloat", 3, Some(*dtype), op.entry()),
        OperationIr::NumericInt(dtype, op) => of("NumericInt", 4, Some(*dtype), op.entry()),
        OperationIr::Bool(op) => of("Bool", 5, None, op.entry()),
        OperationIr::Int(op) => of("Int", 6, None, op.entry()),
        OperationIr::Float(dtype, op) => of("Float", 7, Some(*dtype), op.entry()),
        OperationIr::Module(op) => of("Module", 8, None, op.entry()),
        OperationIr::Init(op) => of("Init", 9, None, (0, "Init", op)),
        OperationIr::Custom(op) => of("Custom", 10, None, (0, "Custom", op)),
        OperationIr::Drop(tensor) => of("Drop", 11, None, (0, "Drop", tensor)),
        // Present only if some crate enables burn-ir's `distributed` feature; the client refuses it by name.
        #[allow(unreachable_patterns)]
        _ => of("Distributed", 12, None, (0, "Distributed", &Nothing)),
    }
}

/// Code within the family, name, parts.
type Entry<'a> = (u64, &'static str, &'a dyn Visit);

/// The name shown to people: `NumericFloat.Add`.
pub fn name(operation: &OperationIr) -> String {
    if let Some(id) = crate::custom::id(operation) {
        return id.to_owned();
    }
    if let Some(name) = crate::inlined::name(operation) {
        return name;
    }
    if crate::rounded::is_with_copy(operation) {
        return crate::rounded::WITH_COPY.to_owned();
    }
    let described = describe(operation);
    format!("{}.{}", described.family, described.variant)
}

/// Whether an operand is a tensor of indices, which may be out of range.
pub fn takes_indices(operation: &OperationIr) -> bool {
    let base = |op: &BaseOperationIr| {
        matches!(
            op,
            BaseOperationIr::Select(_)
                | BaseOperationIr::SelectAssign(_)
                | BaseOperationIr::Gather(_)
                | BaseOperationIr::Scatter(_)
                | BaseOperationIr::GatherNd(_)
                | BaseOperationIr::ScatterNd(_)
        )
    };
    match operation {
        OperationIr::BaseFloat(op) | OperationIr::BaseInt(op) | OperationIr::BaseBool(op) => base(op),
        OperationIr::Module(op) => matches!(
            op,
            ModuleOperationIr::Embedding(_) | ModuleOperationIr::EmbeddingBackward(_)
        ),
        _ => false,
    }
}

/// Visits the parts of an operation, in order.
pub fn walk(operation: &OperationIr, visitor: &mut dyn Visitor) {
    describe(operation).parts.visit(visitor);
}

/// Reads the parts of an operation with their names, in order.
pub fn read(operation: &OperationIr, reader: &mut dyn Reader) {
    describe(operation).parts.read("", reader);
}

/// Whether the scalars of this operation are part of the step's identity (a changed value is another step)
/// instead of runtime arguments.
///
/// Exponents are part of the identity: code for `x^2` and `x^0.5` differs. So are the values that masks
/// write and that comparisons compare with, because rewrites look for them (`-inf` in attention masks, 0 in
/// ReLU) and no schedule changes them. Every other scalar is a runtime argument whatever its value, even 0
/// or 1: Adam's bias correction reaches exactly 1 after some hundred steps and a warm-up may start at 0,
/// and neither may recompile. The exception is a factor of -1, which is Burn's negation: rewrites look for
/// it too. Operations that stay whole carry their scalars inside.
pub fn scalars_are_static(operation: &OperationIr) -> bool {
    use NumericOperationIr as N;
    match operation {
        OperationIr::NumericFloat(_, op) | OperationIr::NumericInt(_, op) => {
            matches!(
                op,
                N::PowiScalar(_)
                    | N::GreaterElem(_)
                    | N::GreaterEqualElem(_)
                    | N::LowerElem(_)
                    | N::LowerEqualElem(_)
            ) || is_negation(op)
        }
        OperationIr::Float(_, op) => matches!(op, FloatOperationIr::PowfScalar(_)),
        OperationIr::BaseFloat(op) | OperationIr::BaseInt(op) | OperationIr::BaseBool(op) => {
            matches!(op, BaseOperationIr::MaskFill(_) | BaseOperationIr::EqualElem(_))
        }
        OperationIr::Int(_) => true,
        OperationIr::Module(op) => !matches!(op, ModuleOperationIr::Attention(_)),
        _ => false,
    }
}

/// Whether this multiplies by -1, as Burn's autodiff does for a minus.
fn is_negation(operation: &NumericOperationIr) -> bool {
    match operation {
        NumericOperationIr::MulScalar(op) => to_scalar(op.rhs).to_f64() == -1.0,
        _ => false,
    }
}

/// How many streams of the device's generator the operation takes: one if it draws random numbers, one for
/// each draw of a function that is a single operation.
pub fn draws(operation: &OperationIr) -> usize {
    match operation {
        OperationIr::Float(_, FloatOperationIr::Random(_))
        | OperationIr::NumericInt(_, NumericOperationIr::IntRandom(_))
        | OperationIr::NumericFloat(_, NumericOperationIr::IntRandom(_)) => 1,
        _ => crate::inlined::find(operation).map_or(0, |function| function.draws()),
    }
}

/// Burn's scalar as the graph's.
pub fn to_scalar(scalar: ScalarIr) -> Scalar {
    match scalar {
        ScalarIr::Float(x) => Scalar::Float(x),
        ScalarIr::Int(x) => Scalar::Int(x),
        ScalarIr::UInt(x) => Scalar::UInt(x),
        ScalarIr::Bool(x) => Scalar::Bool(x),
    }
}

/// For each operation, how many runtime scalars come before it in the stream.
pub fn first_dynamic_scalars(operations: &[OperationIr]) -> Vec<usize> {
    struct Count(usize);
    impl Visitor for Count {
        fn input(&mut self, _: &TensorIr) {}
        fn output(&mut self, _: &TensorIr) {}
        fn scalar(&mut self, _: ScalarIr) {
            self.0 += 1;
        }
        fn word(&mut self, _: u64) {}
    }
    let mut count = Count(0);
    let first = |operation: &OperationIr| {
        let before = count.0;
        if !scalars_are_static(operation) {
            walk(operation, &mut count);
        }
        before
    };
    operations.iter().map(first).collect()
}

/// The name of the part that says which function an operation is.
pub const CLOSURE: &str = "closure";

/// An operation without parts.
#[derive(Debug)]
struct Nothing;

impl Visit for Nothing {
    fn visit(&self, _: &mut dyn Visitor) {}

    fn read(&self, _: &'static str, _: &mut dyn Reader) {}
}

trait Family {
    fn entry(&self) -> Entry<'_>;
}

/// Numbers the variants of an operation enum in the order given.
macro_rules! family {
    ($ty:ident as $codes:ident { $($variant:ident)* }) => {
        enum $codes { $($variant),* }

        impl Family for $ty {
            fn entry(&self) -> Entry<'_> {
                match self { $($ty::$variant(parts) => ($codes::$variant as u64, stringify!($variant), parts)),* }
            }
        }
    };
}

family!(BaseOperationIr as BaseCode {
    Reshape SwapDims Permute Flip Expand Unfold Slice SliceAssign Select SelectAssign MaskWhere MaskFill Gather Scatter
    ScatterNd GatherNd Equal EqualElem RepeatDim Cat Cast Empty Ones Zeros
});
family!(NumericOperationIr as NumericCode {
    Add AddScalar Sub SubScalar Div DivScalar Rem RemScalar Mul MulScalar Abs Full MeanDim Mean Sum SumDim Prod ProdDim
    Greater GreaterElem GreaterEqual GreaterEqualElem Lower LowerElem LowerEqual LowerEqualElem ArgMax ArgTopK TopK
    ArgMin Max MaxDimWithIndices MinDimWithIndices Min MaxDim MinDim MaxAbs MaxAbsDim Clamp IntRandom Powi PowiScalar
    CumSum CumProd CumMin CumMax
});
family!(BoolOperationIr as BoolCode { IntoFloat IntoInt Not And Or });
family!(IntOperationIr as IntCode {
    IntoFloat BitwiseAnd BitwiseAndScalar BitwiseOr BitwiseOrScalar BitwiseXor BitwiseXorScalar BitwiseNot BitwiseLeftShift
    BitwiseLeftShiftScalar BitwiseRightShift BitwiseRightShiftScalar Matmul
});
family!(FloatOperationIr as FloatCode {
    Exp Log Log1p Erf PowfScalar Sqrt Cos Cosh Sin Sinh Tan Tanh ArcCos ArcCosh ArcSin ArcSinh ArcTan ArcTanh ArcTan2 Round
    Floor Ceil Trunc IntoInt Matmul Cross Random Recip IsNan IsInf Quantize Dequantize GridSample2d Powf
});
family!(ModuleOperationIr as ModuleCode {
    Embedding EmbeddingBackward Linear LinearXBackward LinearWeightBackward LinearBiasBackward Conv1d Conv1dXBackward
    Conv1dWeightBackward Conv1dBiasBackward Conv2d Conv2dXBackward Conv2dWeightBackward Conv2dBiasBackward Conv3d
    Conv3dXBackward Conv3dWeightBackward Conv3dBiasBackward DeformableConv2d DeformableConv2dBackward ConvTranspose1d
    ConvTranspose2d ConvTranspose3d AvgPool1d AvgPool2d AvgPool1dBackward AvgPool2dBackward AdaptiveAvgPool1d
    AdaptiveAvgPool2d AdaptiveAvgPool1dBackward AdaptiveAvgPool2dBackward MaxPool1d MaxPool1dWithIndices
    MaxPool1dWithIndicesBackward MaxPool2d MaxPool2dWithIndices MaxPool2dWithIndicesBackward Interpolate
    InterpolateBackward Rfft IRfft Attention CtcLoss CtcLossBackward
});

/// The role of a field, as [`parts!`] spells it, and its visit.
macro_rules! part {
    ($visitor:ident, input, $field:expr) => {
        $visitor.input(&$field)
    };
    ($visitor:ident, inputs, $field:expr) => {
        $field.iter().for_each(|tensor| $visitor.input(tensor))
    };
    // An absent optional operand leaves a mark, so that streams with and without it differ.
    ($visitor:ident, optional, $field:expr) => {
        match &$field {
            Some(tensor) => $visitor.input(tensor),
            None => $visitor.word(u64::MAX),
        }
    };
    ($visitor:ident, output, $field:expr) => {
        $visitor.output(&$field)
    };
    ($visitor:ident, outputs, $field:expr) => {
        $field.iter().for_each(|tensor| $visitor.output(tensor))
    };
    ($visitor:ident, scalar, $field:expr) => {
        $visitor.scalar($field)
    };
    ($visitor:ident, attribute, $field:expr) => {
        $field.visit($visitor)
    };
}

/// The role of a field, and how it is read.
macro_rules! read_part {
    ($reader:ident, input, $name:ident, $field:expr) => {
        $reader.operand(stringify!($name), &$field)
    };
    ($reader:ident, inputs, $name:ident, $field:expr) => {
        $field
            .iter()
            .for_each(|tensor| $reader.operand(stringify!($name), tensor))
    };
    ($reader:ident, optional, $name:ident, $field:expr) => {
        $field
            .iter()
            .for_each(|tensor| $reader.operand(stringify!($name), tensor))
    };
    ($reader:ident, output, $name:ident, $field:expr) => {
        $reader.result(stringify!($name), &$field)
    };
    ($reader:ident, outputs, $name:ident, $field:expr) => {
        $field
            .iter()
            .for_each(|tensor| $reader.result(stringify!($name), tensor))
    };
    ($reader:ident, scalar, $name:ident, $field:expr) => {
        $reader.scalar(stringify!($name), $field)
    };
    ($reader:ident, attribute, $name:ident, $field:expr) => {
        $field.read(stringify!($name), $reader)
    };
}

/// Lists the fields of an operation struct in the order in which they are visited.
macro_rules! parts {
    ($($ty:ident { $($role:ident $field:ident),* $(,)? })*) => {$(
        impl Visit for $ty {
            fn visit(&self, visitor: &mut dyn Visitor) {
                $(part!(visitor, $role, self.$field);)*
            }

            fn read(&self, _: &'static str, reader: &mut dyn Reader) {
                $(read_part!(reader, $role, $field, self.$field);)*
            }
        }
    )*};
}

parts! {
    SwapDimsOpIr { input input, attribute dim1, attribute dim2, output out }
    PermuteOpIr { input input, attribute axes, output out }
    ShapeOpIr { input input, output out }
    UnfoldOpIr { input input, attribute dim, attribute size, attribute step, output out }
    FlipOpIr { input input, attribute axes, output out }
    RandomOpIr { attribute distribution, output out }
    CreationOpIr { output out }
    FullOpIr { scalar value, output out }
    InitOperationIr { output out }
    BinaryOpIr { input lhs, input rhs, output out }
    MatmulOpIr { input lhs, input rhs, output out }
    CrossOpIr { input lhs, input rhs, attribute dim, output out }
    UnaryOpIr { input input, output out }
    ScalarOpIr { input lhs, scalar rhs, output out }
    ReduceOpIr { input input, output out }
    ReduceDimOpIr { input input, attribute axis, attribute accumulator_len, output out }
    CastOpIr { input input, output out }
    DimOpIr { input input, attribute axis, output out }
    GatherOpIr { input tensor, attribute dim, input indices, output out }
    ScatterOpIr { input tensor, attribute dim, input indices, input value, attribute update, output out }
    ScatterNdOpIr { input data, input indices, input values, attribute reduction, output out }
    GatherNdOpIr { input data, input indices, output out }
    SelectOpIr { input tensor, attribute dim, input indices, output out }
    SelectAssignOpIr { input tensor, attribute dim, input indices, input value, attribute update, output out }
    SliceOpIr { input tensor, attribute ranges, output out }
    SliceAssignOpIr { input tensor, attribute ranges, input value, output out }
    MaskWhereOpIr { input tensor, input mask, input value, output out }
    MaskFillOpIr { input tensor, input mask, scalar value, output out }
    ClampOpIr { input tensor, scalar min, scalar max, output out }
    RepeatDimOpIr { input tensor, attribute dim, attribute times, output out }
    CatOpIr { inputs tensors, attribute dim, output out }
    ReduceDimWithIndicesOpIr { input tensor, attribute dim, output out, output out_indices }
    EmbeddingOpIr { input weights, input indices, output out }
    EmbeddingBackwardOpIr { input weights, input out_grad, input indices, output out }
    LinearOpIr { input x, input weight, optional bias, output out }
    LinearXBackwardOpIr { input weight, input output_grad, output out }
    LinearWeightBackwardOpIr { input x, input output_grad, output out }
    LinearBiasBackwardOpIr { input output_grad, output out }
    Conv1dOpIr { input x, input weight, optional bias, attribute options, output out }
    Conv1dXBackwardOpIr { input x, input weight, input output_grad, attribute options, output out }
    Conv1dWeightBackwardOpIr { input x, input weight, input output_grad, attribute options, output out }
    Conv1dBiasBackwardOpIr { input x, input bias, input output_grad, output out }
    Conv2dOpIr { input x, input weight, optional bias, attribute options, output out }
    Conv2dXBackwardOpIr { input x, input weight, input output_grad, attribute options, output out }
    Conv2dWeightBackwardOpIr { input x, input weight, input output_grad, attribute options, output out }
    Conv2dBiasBackwardOpIr { input x, input bias, input output_grad, output out }
    Conv3dOpIr { input x, input weight, optional bias, attribute options, output out }
    Conv3dXBackwardOpIr { input x, input weight, input output_grad, attribute options, output out }
    Conv3dWeightBackwardOpIr { input x, input weight, input output_grad, attribute options, output out }
    Conv3dBiasBackwardOpIr { input x, input bias, input output_grad, output out }
    DeformConv2dOpIr { input x, input offset, input weight, optional mask, optional bias, attribute options, output out }
    DeformConv2dBackwardOpIr {
        input x, input offset, input weight, optional mask, optional bias, input out_grad, attribute options,
        output input_grad, output offset_grad, output weight_grad, outputs mask_grad, outputs bias_grad
    }
    ConvTranspose1dOpIr { input x, input weight, optional bias, attribute options, output out }
    ConvTranspose2dOpIr { input x, input weight, optional bias, attribute options, output out }
    ConvTranspose3dOpIr { input x, input weight, optional bias, attribute options, output out }
    QuantizeOpIr { input tensor, attribute qparams, output out }
    QuantizationParametersIr { input scales }
    DequantizeOpIr { input input, output out }
    AvgPool1dOpIr {
        input x, attribute kernel_size, attribute stride, attribute padding, attribute count_include_pad, attribute ceil_mode,
        output out
    }
    AvgPool2dOpIr {
        input x, attribute kernel_size, attribute stride, attribute padding, attribute count_include_pad, attribute ceil_mode,
        output out
    }
    AvgPool1dBackwardOpIr {
        input x, input grad, attribute kernel_size, attribute stride, attribute padding, attribute count_include_pad,
        attribute ceil_mode, output out
    }
    AvgPool2dBackwardOpIr {
        input x, input grad, attribute kernel_size, attribute stride, attribute padding, attribute count_include_pad,
        attribute ceil_mode, output out
    }
    AdaptiveAvgPool1dOpIr { input x, attribute output_size, output out }
    AdaptiveAvgPool2dOpIr { input x, attribute output_size, output out }
    AdaptiveAvgPool1dBackwardOpIr { input x, input grad, output out }
    AdaptiveAvgPool2dBackwardOpIr { input x, input grad, output out }
    MaxPool1dOpIr {
        input x, attribute kernel_size, attribute stride, attribute padding, attribute dilation, attribute ceil_mode, output out
    }
    MaxPool1dWithIndicesOpIr {
        input x, attribute kernel_size, attribute stride, attribute padding, attribute dilation, attribute ceil_mode, output out,
        output out_indices
    }
    MaxPool1dWithIndicesBackwardOpIr {
        input x, input grad, input indices, attribute kernel_size, attribute stride, attribute padding, attribute dilation,
        attribute ceil_mode, output out
    }
    MaxPool2dOpIr {
        input x, attribute kernel_size, attribute stride, attribute padding, attribute dilation, attribute ceil_mode, output out
    }
    MaxPool2dWithIndicesOpIr {
        input x, attribute kernel_size, attribute stride, attribute padding, attribute dilation, attribute ceil_mode, output out,
        output out_indices
    }
    MaxPool2dWithIndicesBackwardOpIr {
        input x, input grad, input indices, attribute kernel_size, attribute stride, attribute padding, attribute dilation,
        attribute ceil_mode, output out
    }
    InterpolateOpIr { input x, attribute output_size, attribute options, output out }
    InterpolateBackwardOpIr { input x, input grad, attribute output_size, attribute options, output out }
    RfftOpIr { input signal, attribute dim, attribute n, output out_re, output out_im }
    IRfftOpIr { input input_re, input input_im, attribute dim, attribute n, output out_signal }
    AttentionOpIr { input query, input key, input value, optional mask, optional attn_bias, attribute options, output out }
    CtcLossOpIr { input log_probs, input targets, input input_lengths, input target_lengths, attribute blank, output out }
    CtcLossBackwardOpIr {
        input log_probs, input targets, input input_lengths, input target_lengths, input grad_loss, attribute blank, output out
    }
    GridSample2dOpIr { input tensor, input grid, attribute options, output out }
    Conv1dOptionsIr { attribute stride, attribute padding, attribute dilation, attribute groups }
    Conv2dOptionsIr { attribute stride, attribute padding, attribute dilation, attribute groups }
    Conv3dOptionsIr { attribute stride, attribute padding, attribute dilation, attribute groups }
    DeformableConv2dOptionsIr {
        attribute stride, attribute padding, attribute dilation, attribute weight_groups, attribute offset_groups
    }
    ConvTranspose1dOptionsIr {
        attribute stride, attribute padding, attribute padding_out, attribute dilation, attribute groups
    }
    ConvTranspose2dOptionsIr {
        attribute stride, attribute padding, attribute padding_out, attribute dilation, attribute groups
    }
    ConvTranspose3dOptionsIr {
        attribute stride, attribute padding, attribute padding_out, attribute dilation, attribute groups
    }
    AttentionOptionsIr { attribute scale, attribute softcap, attribute is_causal }
    InterpolateOptionsIr { attribute mode, attribute align_corners }
    GridSampleOptionsIr { attribute mode, attribute padding_mode, attribute align_corners }
}

impl Visit for CustomOpIr {
    fn visit(&self, visitor: &mut dyn Visitor) {
        visitor.word(self.id.len() as u64);
        self.id.bytes().for_each(|byte| visitor.word(u64::from(byte)));
        visitor.word(self.inputs.len() as u64);
        self.inputs.iter().for_each(|tensor| visitor.input(tensor));
        self.outputs.iter().for_each(|tensor| visitor.output(tensor));
    }

    fn read(&self, _: &'static str, reader: &mut dyn Reader) {
        let name = match crate::inlined::is_function(&self.id) {
            true => CLOSURE,
            false => "id",
        };
        reader.attribute(name, self.id.clone());
        self.inputs
            .iter()
            .for_each(|tensor| reader.operand("input", tensor));
        self.outputs
            .iter()
            .for_each(|tensor| reader.result("output", tensor));
    }
}

/// A dropped tensor is read one last time, in a way.
impl Visit for TensorIr {
    fn visit(&self, visitor: &mut dyn Visitor) {
        visitor.input(self);
    }

    fn read(&self, _: &'static str, reader: &mut dyn Reader) {
        reader.operand("tensor", self);
    }
}
