//! Products of matrices by plain loops, for what cuBLASLt computes on a device.

use kiln_graph::{DType, HostTensor, TensorType};

use crate::products::{Epilogue, Number, Product, ScalarsFrom};

pub(super) fn dtype(number: Number) -> DType {
    match number {
        Number::F32 => DType::F32,
        Number::F64 => DType::F64,
        Number::F16 => DType::F16,
        Number::Bf16 => DType::BF16,
    }
}

/// Elements as f64.
pub(super) fn widen(number: Number, bytes: &[u8]) -> Vec<f64> {
    let count = bytes.len() / number.bytes();
    let whole = bytes[..count * number.bytes()].to_vec();
    HostTensor::from_bytes(TensorType::new(dtype(number), [count]), whole)
        .expect("as many bytes as elements")
        .to_f64s()
}

/// Computes `product`. Operands and results begin with their first element.
pub(super) fn compute(product: &Product, left: &[u8], right: &[u8], result: &mut [u8]) -> Result<(), String> {
    if product.epilogue != Epilogue::None || product.scalars == ScalarsFrom::Device {
        return Err(format!("the host does not compute the product {product}"));
    }
    let sizes = [
        (product.left_bytes(), left.len(), "left"),
        (product.right_bytes(), right.len(), "right"),
        (product.result_bytes(), result.len(), "result"),
    ];
    for (needed, there, name) in sizes {
        if needed > there {
            return Err(format!(
                "product {product}: {name} spans {needed} bytes, of which {there} are there"
            ));
        }
    }
    let lefts = widen(product.left.number, &left[..product.left_bytes()]);
    let rights = widen(product.right.number, &right[..product.right_bytes()]);
    let [batch, m, n, k] = [product.batch, product.m, product.n, product.k].map(|count| count as usize);
    // Elements from one to the next along rows and columns.
    let strides = |transposed: bool, leading: u64| match transposed {
        true => (1, leading as usize),
        false => (leading as usize, 1),
    };
    let (left_row, left_column) = strides(product.left.transposed, product.left.leading);
    let (right_row, right_column) = strides(product.right.transposed, product.right.leading);
    let number = product.result.number;
    for number_of in 0..batch {
        let left = &lefts[number_of * product.left.batch_stride as usize..];
        let right = &rights[number_of * product.right.batch_stride as usize..];
        for row in 0..m {
            let first =
                number_of * product.result.batch_stride as usize + row * product.result.leading as usize;
            let at = first * number.bytes()..(first + n) * number.bytes();
            let old = match product.scalars {
                ScalarsFrom::Sum => widen(number, &result[at.clone()]),
                _ => vec![0.0; n],
            };
            let sums = old.into_iter().enumerate().map(|(column, old)| {
                let terms = (0..k).map(|depth| {
                    left[row * left_row + depth * left_column]
                        * right[depth * right_row + column * right_column]
                });
                old + terms.sum::<f64>()
            });
            let rounded = HostTensor::from_floats(dtype(number), [n], sums);
            result[at].copy_from_slice(rounded.bytes());
        }
    }
    Ok(())
}
