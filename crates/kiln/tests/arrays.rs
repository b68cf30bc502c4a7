//! Arrays of `ndarray` in and out: what is copied, what is refused, and results equal to those of tensors.

use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::activation::relu;
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};
use burn_autodiff::Autodiff;
use kiln::arrays::{ArrayError, ArrayName, HostArray, Plain, copied_bytes, with_arrays};
use kiln::{CompileBackend, CompileOptions, Kiln, KilnDevice, KilnTensor, StepInput, TrainStep};
use kiln_burn::table::{self, Slot};
use ndarray::{Array, Array1, Array2, ArrayD, Axis, Dimension, Ix1, Ix2, array, s};

/// The count of copies is the process's: tests take turns.
static TURN: Mutex<()> = Mutex::new(());

fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn device() -> KilnDevice {
    KilnDevice::cpu()
}

fn numbers(rows: usize, columns: usize) -> Array2<f32> {
    Array2::from_shape_fn((rows, columns), |(i, j)| {
        (0.3 + 1.7 * (i * columns + j) as f32).sin()
    })
}

fn tensor<const D: usize, Dm: Dimension>(array: &Array<f32, Dm>) -> Tensor<Kiln, D> {
    let data = TensorData::new(
        array.iter().copied().collect::<Vec<f32>>(),
        array.shape().to_vec(),
    );
    Tensor::from_data(data, &device())
}

/// Where the elements of the tensors of `input` are.
fn addresses<T: StepInput>(input: T) -> Vec<*const u8> {
    let mut found = Vec::new();
    input.map(&mut |tensor: KilnTensor| {
        match table::get(tensor.clone().into_ir().id) {
            Some(Slot::Ready(storage)) => found.push(storage.buffer().0),
            _ => panic!("the tensor has elements"),
        }
        tensor
    });
    found
}

fn product((x, w): (Tensor<Kiln, 2>, Tensor<Kiln, 2>)) -> (Tensor<Kiln, 2>, Tensor<Kiln, 1>) {
    let y = x.matmul(w).tanh();
    (y.clone() * 2.0, y.sum_dim(1).squeeze_dim::<1>(1))
}

#[test]
fn tensors_read_arrays_where_they_are() {
    let _turn = turn();
    let (x, ids) = (numbers(6, 4), array![3i64, 1, 2]);
    let rows = x.slice(s![2..5, ..]);
    let lent = (rows, &ids, x.clone().into_shared());
    let shared = lent.2.as_ptr();
    type Input = (Tensor<Kiln, 2>, Tensor<Kiln, 1, Int>, Tensor<Kiln, 2>);
    let found = with_arrays(lent, &device(), |input: Input| addresses(input)).unwrap();
    assert_eq!(found[0], rows.as_ptr().cast());
    assert_eq!(found[1], ids.as_ptr().cast());
    assert_eq!(found[2], shared.cast());
}

#[test]
fn functions_take_and_give_arrays() {
    let _turn = turn();
    let (data, w) = (numbers(9, 5), numbers(5, 3));
    for &backend in &[
        CompileBackend::AotEager,
        CompileBackend::Interpret,
        CompileBackend::Cpu,
    ] {
        let options = CompileOptions::default().with_backend(backend);
        let function = kiln::compile_fn(product).with_options(options);
        for begin in [0, 1, 4] {
            // Rows 1 to 5 begin 20 bytes behind a border of 4 bytes.
            let x = data.slice(s![begin..begin + 5, ..]);
            let (y, sums) = function.call((tensor(&x.to_owned()), tensor(&w))).unwrap();
            let before = copied_bytes();
            let arrays = (x, &w);
            let found: (HostArray<f32, Ix2>, Array1<f32>) = function.call_arrays(arrays, &device()).unwrap();
            assert_eq!(copied_bytes(), before, "{backend}");
            let expected = y.into_data().to_vec::<f32>().unwrap();
            assert_eq!(found.0.view().as_slice().unwrap(), expected, "{backend}");
            assert_eq!(
                found.1.as_slice().unwrap(),
                sums.into_data().to_vec::<f32>().unwrap(),
                "{backend}"
            );
        }
    }
}

#[test]
fn results_stay_where_the_step_has_written_them() {
    let _turn = turn();
    let function = kiln::compile_fn(product);
    let (x, w) = (numbers(7, 5), numbers(5, 3));
    let (y, _) = function.call((tensor(&x), tensor(&w))).unwrap();
    let place = addresses(y.clone())[0];
    let array = <HostArray<f32, Ix2> as kiln::arrays::ArrayOutput<Tensor<Kiln, 2>>>::of(y).unwrap();
    assert_eq!(array.view().as_ptr().cast(), place);
    assert_eq!(array.view().shape(), [7, 3]);
    // An array of its own is a copy, by the form of such arrays.
    assert_ne!(array.to_owned().as_ptr().cast(), place);
    assert_eq!(array.to_owned(), array.view());
}

#[test]
fn integers_and_bools() {
    let _turn = turn();
    let table = array![[0.5f32, 1.0], [2.0, 3.0], [4.0, 5.0]];
    let pick = |(table, ids): (Tensor<Kiln, 2>, Tensor<Kiln, 1, Int>)| {
        let rows = table.select(0, ids.clone());
        (rows, ids.greater_elem(1))
    };
    let function = kiln::compile_fn(pick);
    let expected = array![[4.0f32, 5.0], [0.5, 1.0]];
    let before = copied_bytes();
    let (rows, large): (Array2<f32>, Array1<bool>) = function
        .call_arrays((&table, array![2i64, 0]), &device())
        .unwrap();
    assert_eq!((rows, large), (expected.clone(), array![true, false]));
    let (rows, large): (Array2<f32>, Array1<bool>) = function
        .call_arrays((&table, array![2i32, 0]), &device())
        .unwrap();
    assert_eq!((rows, large), (expected, array![true, false]));
    assert_eq!(copied_bytes(), before);
    let choose = |(x, mask, factor): (Tensor<Kiln, 1>, Tensor<Kiln, 1, burn::tensor::Bool>, f64)| {
        x.clone().mask_where(mask, x * factor)
    };
    let input = (array![1.0f32, 2.0], array![true, false], Plain(3.0));
    let y: Array1<f32> = kiln::compile_fn(choose).call_arrays(input, &device()).unwrap();
    assert_eq!(y, array![3.0, 2.0]);
}

#[test]
fn what_does_not_fit_is_an_error() {
    let _turn = turn();
    let double = kiln::compile_fn(|x: Tensor<Kiln, 2>| x * 2.0);
    let x = numbers(4, 3);
    let error = double
        .call_arrays::<_, _, _, Array2<f32>>(x.t(), &device())
        .unwrap_err();
    let ArrayError::Layout {
        argument,
        shape,
        strides,
    } = &error
    else {
        panic!("{error}")
    };
    assert_eq!(
        (*argument, &shape[..], &strides[..]),
        (0, &[3, 4][..], &[1, 3][..])
    );
    assert!(error.to_string().contains("as_standard_layout"), "{error}");
    // What the message proposes is right.
    let y: Array2<f32> = double.call_arrays(x.t().as_standard_layout(), &device()).unwrap();
    assert_eq!(y, &x.t() * 2.0);
    let columns = x.slice(s![.., ..2]);
    let error = double
        .call_arrays::<_, _, _, Array2<f32>>(columns, &device())
        .unwrap_err();
    assert!(matches!(error, ArrayError::Layout { .. }), "{error}");

    let cube: ArrayD<f32> = ArrayD::zeros(vec![2, 2, 2]);
    let error = double
        .call_arrays::<_, _, _, Array2<f32>>(&cube, &device())
        .unwrap_err();
    assert!(
        matches!(
            error,
            ArrayError::Rank {
                array: ArrayName::Argument(0),
                expected: 2,
                found: 3
            }
        ),
        "{error}"
    );
    let error = double
        .call_arrays::<_, _, _, Array<f32, Ix1>>(&x, &device())
        .unwrap_err();
    assert!(
        matches!(
            error,
            ArrayError::Rank {
                array: ArrayName::Result,
                expected: 1,
                found: 2
            }
        ),
        "{error}"
    );
    let error = double
        .call_arrays::<_, _, _, Array2<f64>>(&x, &device())
        .unwrap_err();
    assert!(matches!(error, ArrayError::ElementType { .. }), "{error}");
    assert!(
        error.to_string().contains("F64") && error.to_string().contains("F32"),
        "{error}"
    );
}

#[test]
fn what_outlives_the_call_is_copied_once() {
    let _turn = turn();
    let same = kiln::compile_fn(|x: Tensor<Kiln, 2>| (x.clone(), x + 1.0));
    let mut x = numbers(3, 2);
    let expected = x.clone();
    let before = copied_bytes();
    let (itself, more) =
        with_arrays(x.view(), &device(), |x: Tensor<Kiln, 2>| same.call(x).unwrap()).unwrap();
    assert_eq!(copied_bytes() - before, 24, "the argument, which is a result");
    x.fill(0.0);
    drop(x);
    assert_eq!(
        itself.into_data().to_vec::<f32>().unwrap(),
        expected.clone().into_raw_vec_and_offset().0
    );
    assert_eq!(
        more.into_data().to_vec::<f32>().unwrap(),
        (expected.clone() + 1.0).into_raw_vec_and_offset().0
    );

    // A region around the call runs when it ends.
    let mut region = kiln::compile(CompileOptions::default());
    let y = region.run(|| {
        let x = expected.clone();
        with_arrays(x, &device(), |x: Tensor<Kiln, 2>| x * 2.0).unwrap()
    });
    let y = y.unwrap().into_data().to_vec::<f32>().unwrap();
    assert_eq!(y, (expected * 2.0).into_raw_vec_and_offset().0);
}

#[derive(Module, Debug)]
struct Network<B: Backend> {
    hidden: Linear<B>,
    out: Linear<B>,
}

type B = Autodiff<Kiln>;

fn network() -> Network<B> {
    B::seed(&device(), 7);
    Network {
        hidden: LinearConfig::new(4, 16).init(&device()),
        out: LinearConfig::new(16, 3).init(&device()),
    }
}

fn loss(model: &Network<B>, (x, labels): (Tensor<B, 2>, Tensor<B, 1, Int>)) -> Tensor<B, 1> {
    let logits = model.out.forward(relu(model.hidden.forward(x)));
    CrossEntropyLossConfig::new()
        .init(&logits.device())
        .forward(logits, labels)
}

#[test]
fn training_reads_batches_where_they_are() {
    let _turn = turn();
    let data = numbers(64, 4);
    let labels = data.map_axis(Axis(1), |row| i64::from(row[0] > 0.0) + i64::from(row[1] > 0.3));
    let mut on_arrays = TrainStep::new(network(), AdamWConfig::new().init(), loss)
        .build()
        .unwrap();
    let mut losses = Vec::new();
    let before = copied_bytes();
    for step in 0..24 {
        let rows = s![step % 4 * 16..(step % 4 + 1) * 16, ..];
        let batch = (
            data.slice(rows),
            labels.slice(s![step % 4 * 16..(step % 4 + 1) * 16]),
        );
        let loss = on_arrays.step_arrays(1e-2, batch, &device()).unwrap();
        losses.push(loss.into_scalar());
    }
    assert_eq!(copied_bytes(), before, "{}", on_arrays.history());
    assert!(on_arrays.history().replayed >= 18, "{}", on_arrays.history());

    let mut on_tensors = TrainStep::new(network(), AdamWConfig::new().init(), loss)
        .build()
        .unwrap();
    for (step, expected) in losses.iter().enumerate() {
        let range = step % 4 * 16..(step % 4 + 1) * 16;
        let x = data.slice(s![range.clone(), ..]).to_owned();
        let x = TensorData::new(x.into_raw_vec_and_offset().0, [16, 4]);
        let ids = TensorData::new(labels.slice(s![range]).to_vec(), [16]);
        let input = (
            Tensor::<B, 2>::from_data(x, &device()),
            Tensor::<B, 1, Int>::from_data(ids, (&device(), burn::tensor::DType::I64)),
        );
        let loss = on_tensors.step(1e-2, input).unwrap().into_scalar();
        assert_eq!(loss.to_bits(), expected.to_bits(), "step {step}");
    }
    assert!(losses[23] < losses[0], "{losses:?}");
}
