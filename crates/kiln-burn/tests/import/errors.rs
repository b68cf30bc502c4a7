//! What cannot run says so, and operands that are used twice or not at all are no special case.

use burn_backend::{DType, Shape, TensorData};
use burn_flex::FlexTensor;
use burn_ir::{
    BaseOperationIr, BinaryOpIr, CustomOpIr, DequantizeOpIr, FloatOperationIr, NumericOperationIr,
    OperationIr, SliceAssignOpIr, TensorId, TensorIr, TensorStatus, UnaryOpIr,
};
use kiln_burn::eager::{self, OperationError, TensorStore};
use kiln_burn::import::{self, ImportError, ScalarSource};
use kiln_burn::record::Source;
use rustc_hash::FxHashMap;

#[derive(Default)]
struct Store(FxHashMap<u64, FlexTensor>);

impl TensorStore for Store {
    fn take(&mut self, ir: &TensorIr) -> Result<FlexTensor, OperationError> {
        let tensor = match ir.status {
            TensorStatus::ReadWrite => self.0.remove(&ir.id.value()),
            _ => self.0.get(&ir.id.value()).cloned(),
        };
        tensor.ok_or_else(|| OperationError::missing(ir.id))
    }

    fn put(&mut self, ir: &TensorIr, tensor: FlexTensor) {
        self.0.insert(ir.id.value(), tensor);
    }
}

fn ir(id: u64, status: TensorStatus) -> TensorIr {
    TensorIr {
        id: TensorId::new(id),
        shape: Shape::from(vec![2]),
        status,
        dtype: DType::F32,
    }
}

fn store(tensors: &[(u64, [f32; 2])]) -> Store {
    let entry = |(id, values): &(u64, [f32; 2])| (*id, FlexTensor::from_data(TensorData::from(*values)));
    Store(tensors.iter().map(entry).collect())
}

fn run(operation: &OperationIr, store: &mut Store) -> Result<(), OperationError> {
    eager::run(operation, store, &mut || unreachable!("nothing is random"))
}

fn unsupported() -> [OperationIr; 2] {
    let (input, out) = (ir(1, TensorStatus::ReadOnly), ir(2, TensorStatus::NotInit));
    [
        OperationIr::Float(
            DType::F32,
            FloatOperationIr::Dequantize(DequantizeOpIr {
                input: input.clone(),
                out: out.clone(),
            }),
        ),
        OperationIr::Custom(CustomOpIr::new("mine", &[input], &[out])),
    ]
}

#[test]
fn what_cannot_run_names_the_operation_and_a_way_out() {
    for (operation, name) in unsupported().iter().zip(["Float.Dequantize", "Custom.Custom"]) {
        let error = run(operation, &mut store(&[(1, [1.0, 2.0])])).unwrap_err();
        assert!(matches!(error, OperationError::Unsupported { .. }));
        let text = error.to_string();
        assert!(text.contains(name) && text.contains(';'), "{text}");

        let error = import::import(std::slice::from_ref(operation), &[TensorId::new(2)]).unwrap_err();
        assert!(matches!(error, ImportError::Unsupported { position: 0, .. }));
        assert!(error.to_string().contains(name), "{error}");
    }
}

#[test]
fn a_missing_operand_is_an_error() {
    let operation = OperationIr::Float(
        DType::F32,
        FloatOperationIr::Exp(UnaryOpIr {
            input: ir(7, TensorStatus::ReadOnly),
            out: ir(8, TensorStatus::NotInit),
        }),
    );
    let error = run(&operation, &mut Store::default()).unwrap_err();
    assert_eq!(error, OperationError::Missing { tensor: 7 });
    let unknown = import::import(&[operation], &[TensorId::new(9)]).unwrap_err();
    assert!(matches!(unknown, ImportError::UnknownOutput { tensor: 9 }));
}

/// Whichever of two uses is marked as the last, both see the value, and the tensor is gone afterwards.
#[test]
fn one_tensor_as_both_operands() {
    let uses = [
        (TensorStatus::ReadOnly, TensorStatus::ReadWrite),
        (TensorStatus::ReadWrite, TensorStatus::ReadOnly),
    ];
    for (first, second) in uses {
        let operation = OperationIr::NumericFloat(
            DType::F32,
            NumericOperationIr::Mul(BinaryOpIr {
                lhs: ir(1, first),
                rhs: ir(1, second),
                out: ir(2, TensorStatus::NotInit),
            }),
        );
        let mut store = store(&[(1, [3.0, -4.0])]);
        run(&operation, &mut store).unwrap();
        assert_eq!(store.0[&2].storage::<f32>(), [9.0, 16.0]);
        assert!(!store.0.contains_key(&1));
    }
}

/// A tensor that dies as an operand may be overwritten; one that lives on may not.
#[test]
fn only_dying_operands_are_overwritten() {
    let assign = |status| {
        OperationIr::BaseFloat(BaseOperationIr::SliceAssign(SliceAssignOpIr {
            tensor: ir(1, status),
            ranges: vec![burn_backend::Slice::from(0..1)],
            value: TensorIr {
                shape: Shape::from(vec![1]),
                ..ir(3, TensorStatus::ReadOnly)
            },
            out: ir(2, TensorStatus::NotInit),
        }))
    };
    for status in [TensorStatus::ReadOnly, TensorStatus::ReadWrite] {
        let mut store = store(&[(1, [1.0, 2.0])]);
        store
            .0
            .insert(3, FlexTensor::from_data(TensorData::from([9.0f32])));
        let before = store.0[&1].bytes().as_ptr();
        run(&assign(status), &mut store).unwrap();
        assert_eq!(store.0[&2].storage::<f32>(), [9.0, 2.0]);
        // burn-flex copies here in any case: it keeps its operand until the copy is made.
        let reused = store.0[&2].bytes().as_ptr() == before;
        assert!(!reused || status == TensorStatus::ReadWrite);
        if status == TensorStatus::ReadOnly {
            assert_eq!(store.0[&1].storage::<f32>(), [1.0, 2.0]);
        }
    }
}

/// Where burn-flex works in place, it gets to: a dying operand's buffer is the result's, a living one's is
/// not.
#[test]
fn a_dying_operand_gives_its_buffer() {
    for status in [TensorStatus::ReadOnly, TensorStatus::ReadWrite] {
        let mut store = store(&[(1, [4.0, 9.0])]);
        let before = store.0[&1].bytes().as_ptr();
        let sqrt = UnaryOpIr {
            input: ir(1, status),
            out: ir(2, TensorStatus::NotInit),
        };
        run(
            &OperationIr::Float(DType::F32, FloatOperationIr::Sqrt(sqrt)),
            &mut store,
        )
        .unwrap();
        assert_eq!(store.0[&2].storage::<f32>(), [2.0, 3.0]);
        let reused = store.0[&2].bytes().as_ptr() == before;
        assert_eq!(reused, status == TensorStatus::ReadWrite);
        if !reused {
            assert_eq!(store.0[&1].storage::<f32>(), [4.0, 9.0]);
        }
    }
}

/// A panic of burn-flex passes through and leaves the other tensors alone.
#[test]
fn a_panic_leaves_the_store_whole() {
    let operation = OperationIr::NumericFloat(
        DType::F32,
        NumericOperationIr::Add(BinaryOpIr {
            lhs: ir(1, TensorStatus::ReadOnly),
            rhs: ir(4, TensorStatus::ReadWrite),
            out: ir(2, TensorStatus::NotInit),
        }),
    );
    let mut store = store(&[(1, [1.0, 2.0])]);
    store
        .0
        .insert(4, FlexTensor::from_data(TensorData::from([1.0f32, 2.0, 3.0])));
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run(&operation, &mut store)));
    assert!(result.is_err());
    assert_eq!(store.0[&1].storage::<f32>(), [1.0, 2.0]);
    assert!(!store.0.contains_key(&2));
}

/// Arguments are numbered by first use and scalars by the order of operations; locations reach the nodes.
#[test]
fn arguments_scalars_and_locations() {
    let scalar = |input: u64, out: u64, value: f64| {
        OperationIr::NumericFloat(
            DType::F32,
            NumericOperationIr::MulScalar(burn_ir::ScalarOpIr {
                lhs: ir(input, TensorStatus::ReadOnly),
                rhs: burn_ir::ScalarIr::Float(value),
                out: ir(out, TensorStatus::NotInit),
            }),
        )
    };
    let operations = [scalar(5, 10, 0.5), scalar(3, 11, 2.0), scalar(10, 12, 4.0)];
    let outputs = [TensorId::new(12), TensorId::new(11)];
    let imported = import::import_located(&operations, &outputs, |op| Source {
        line: Some(format!("main.rs:{op}").into()),
        ..Source::default()
    })
    .unwrap();
    let inputs: Vec<u64> = imported.inputs.iter().map(|ir| ir.id.value()).collect();
    assert_eq!(inputs, [5, 3]);
    let expected: Vec<ScalarSource> = (0..3).map(|op| ScalarSource::Operation { op, nth: 0 }).collect();
    assert_eq!(imported.scalars, expected);
    let def = imported.graph.def(imported.graph.outputs[0].value);
    assert_eq!(
        def.provenance.operation.as_deref(),
        Some("NumericFloat.MulScalar")
    );
    assert_eq!(def.provenance.location.as_deref(), Some("main.rs:2"));
}

/// Operations of the program's own are one kind of operation, and each keeps its own name.
#[test]
fn operations_of_the_programs_own_keep_their_names() {
    let custom = |name: &'static str, input: u64, out: u64| {
        let (input, out) = (ir(input, TensorStatus::ReadOnly), ir(out, TensorStatus::NotInit));
        OperationIr::Custom(CustomOpIr::new(name, &[input], &[out]))
    };
    let operations = [custom("custom first", 1, 2), custom("custom second", 2, 3)];
    let imported = import::import(&operations, &[TensorId::new(2), TensorId::new(3)]).unwrap();
    let names = imported.graph.outputs.iter().map(|output| {
        let node = imported.graph.def(output.value);
        node.provenance.operation.as_deref()
    });
    let names: Vec<Option<&str>> = names.collect();
    assert_eq!(names, [Some("custom first"), Some("custom second")]);
}
