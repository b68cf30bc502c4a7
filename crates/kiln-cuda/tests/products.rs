//! Products on a GPU against sums in f64. Without a GPU these tests say so and pass.

mod common;

use std::sync::Arc;

use half::{bf16, f16};
use kiln_cuda::CudaError;
use kiln_cuda::products::{
    Choice, Compute, Epilogue, Multiplier, Number, Product, ProductArguments, ScalarsFrom, SearchLimits,
};
use kiln_cuda::runtime::{Storage, Stream};

/// Rounds numbers to a type and gives their bytes.
fn encode(values: &[f64], number: Number) -> Vec<u8> {
    match number {
        Number::F64 => values.iter().flat_map(|x| x.to_ne_bytes()).collect(),
        Number::F32 => values.iter().flat_map(|x| (*x as f32).to_ne_bytes()).collect(),
        Number::F16 => values
            .iter()
            .flat_map(|x| f16::from_f64(*x).to_ne_bytes())
            .collect(),
        Number::Bf16 => values
            .iter()
            .flat_map(|x| bf16::from_f64(*x).to_ne_bytes())
            .collect(),
    }
}

fn decode(raw: &[u8], number: Number) -> Vec<f64> {
    match number {
        Number::F64 => raw
            .as_chunks::<8>()
            .0
            .iter()
            .map(|x| f64::from_ne_bytes(*x))
            .collect(),
        Number::F32 => raw
            .as_chunks::<4>()
            .0
            .iter()
            .map(|x| f32::from_ne_bytes(*x).into())
            .collect(),
        Number::F16 => raw
            .as_chunks::<2>()
            .0
            .iter()
            .map(|x| f16::from_ne_bytes(*x).into())
            .collect(),
        Number::Bf16 => raw
            .as_chunks::<2>()
            .0
            .iter()
            .map(|x| bf16::from_ne_bytes(*x).into())
            .collect(),
    }
}

/// Numbers between -1 and 1, rounded to the type: what the device sees is what the reference sees.
fn random(count: usize, number: Number, seed: u64) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let draw = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
    };
    let exact: Vec<f64> = (0..count).map(draw).collect();
    decode(&encode(&exact, number), number)
}

/// A product's operands on the host.
struct Data {
    left: Vec<f64>,
    right: Vec<f64>,
    result: Vec<f64>,
    vector: Vec<f64>,
    factors: (f64, f64),
}

impl Data {
    fn draw(product: &Product, seed: u64) -> Self {
        let elements = |bytes: usize, number: Number| bytes / number.bytes();
        let of = |bytes, number, seed| random(elements(bytes, number), number, seed);
        Self {
            left: of(product.left_bytes(), product.left.number, seed),
            right: of(product.right_bytes(), product.right.number, seed + 1),
            result: of(product.result_bytes(), product.result.number, seed + 2),
            vector: of(product.vector_bytes(), product.result.number, seed + 3),
            factors: match product.scalars {
                ScalarsFrom::Product => (1.0, 0.0),
                ScalarsFrom::Sum => (1.0, 1.0),
                ScalarsFrom::Device => (0.5, -2.0),
            },
        }
    }

    /// The vector after the product: sums of an operand, or what it was.
    fn vector_after(&self, product: &Product) -> Vec<f64> {
        let (rows, columns, operand, values) = match product.epilogue {
            Epilogue::LeftSums => (product.m, product.k, product.left, &self.left),
            Epilogue::RightSums => (product.n, product.k, product.right, &self.right),
            _ => return self.vector.clone(),
        };
        // Rows of the left operand, columns of the right one: the same in memory where one of them is
        // transposed.
        let along = operand.transposed != (product.epilogue == Epilogue::LeftSums);
        let at = |row, p| {
            if along {
                row * operand.leading + p
            } else {
                p * operand.leading + row
            }
        };
        (0..rows)
            .map(|row| (0..columns).map(|p| values[at(row, p) as usize]).sum())
            .collect()
    }

    /// The product in f64, element by element.
    fn reference(&self, product: &Product) -> Vec<f64> {
        let mut result = self.result.clone();
        let (left, right) = (product.left, product.right);
        let at = |transposed: bool, leading: u64, row: u64, column: u64| {
            if transposed {
                column * leading + row
            } else {
                row * leading + column
            }
        };
        for b in 0..product.batch {
            for i in 0..product.m {
                for j in 0..product.n {
                    let sum: f64 = (0..product.k)
                        .map(|p| {
                            let l = b * left.batch_stride + at(left.transposed, left.leading, i, p);
                            let r = b * right.batch_stride + at(right.transposed, right.leading, p, j);
                            self.left[l as usize] * self.right[r as usize]
                        })
                        .sum();
                    let place = (b * product.result.batch_stride + i * product.result.leading + j) as usize;
                    let mut x = self.factors.0 * sum;
                    if self.factors.1 != 0.0 {
                        x += self.factors.1 * self.result[place];
                    }
                    if product.epilogue.adds_vector() {
                        x += self.vector[j as usize];
                    }
                    result[place] = match product.epilogue {
                        Epilogue::None | Epilogue::Bias | Epilogue::LeftSums | Epilogue::RightSums => x,
                        Epilogue::Relu | Epilogue::BiasRelu => x.max(0.0),
                        Epilogue::TanhGelu | Epilogue::BiasTanhGelu => {
                            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
                            0.5 * x * (1.0 + inner.tanh())
                        }
                    };
                }
            }
        }
        result
    }
}

fn upload(stream: &Stream, values: &[f64], number: Number) -> Arc<Storage> {
    let raw = encode(values, number);
    let storage = Arc::new(Storage::allocate(stream, raw.len()).unwrap());
    stream.write(&raw, &storage, 0).unwrap();
    storage
}

/// Runs a product with `choice`; the bytes of its result, then those of the vector.
fn run(multiplier: &Multiplier, stream: &Stream, product: &Product, choice: &Choice, data: &Data) -> Vec<u8> {
    let left = upload(stream, &data.left, product.left.number);
    let right = upload(stream, &data.right, product.right.number);
    let result = upload(stream, &data.result, product.result.number);
    let vector = upload(stream, &data.vector, product.result.number);
    let wide = if product.compute == Compute::F64 {
        Number::F64
    } else {
        Number::F32
    };
    let factors = upload(stream, &[data.factors.0, data.factors.1], wide);
    let mut prepared = multiplier.prepare(product, choice).unwrap();
    assert_eq!(prepared.workspace_bytes() as u64, choice.workspace_bytes);
    let workspace = Arc::new(Storage::allocate(stream, prepared.workspace_bytes()).unwrap());
    let arguments = ProductArguments {
        vector: product.epilogue.has_vector().then_some((&vector, 0)),
        scalars: (product.scalars == ScalarsFrom::Device).then_some((&factors, 0)),
        workspace: Some((&workspace, 0)),
        ..ProductArguments::new((&left, 0), (&right, 0), (&result, 0))
    };
    prepared.run(stream, &arguments).unwrap();
    let mut raw = vec![0; result.bytes() + vector.bytes()];
    let (first, second) = raw.split_at_mut(result.bytes());
    stream.read(&result, 0, first).unwrap();
    stream.read(&vector, 0, second).unwrap();
    raw
}

/// Distance over norm.
fn distance(found: &[f64], expected: &[f64]) -> f64 {
    let off: f64 = found.iter().zip(expected).map(|(f, e)| (f - e).powi(2)).sum();
    let norm: f64 = expected.iter().map(|e| e * e).sum();
    (off / norm).sqrt()
}

/// What a type may be off: the rounding of the result, or of the sums.
fn allowed(product: &Product) -> f64 {
    let has_gelu = matches!(product.epilogue, Epilogue::TanhGelu | Epilogue::BiasTanhGelu);
    match (product.result.number, product.compute) {
        (Number::Bf16, _) => 3e-3,
        (Number::F16, _) => 4e-4,
        (_, Compute::Tf32) => 1e-3,
        // The library's GELU has constants of f32 in f64, and an approximate hyperbolic tangent in f32.
        (Number::F64, _) if has_gelu => 1e-9,
        (Number::F32, _) if has_gelu => 1e-4,
        (Number::F64, _) => 1e-14,
        (Number::F32, _) => 1e-6,
    }
}

/// Searches, runs twice with what JSON gives back, and compares.
fn check(multiplier: &Multiplier, stream: &Stream, product: &Product, worst: &mut Vec<String>) {
    let limits = SearchLimits {
        algorithms: 16,
        runs: 2,
        ..SearchLimits::default()
    };
    let choice = multiplier.search(stream, product, limits).unwrap();
    let text = serde_json::to_string(&choice).unwrap();
    let choice: Choice = serde_json::from_str(&text).unwrap();
    let data = Data::draw(product, 42);
    let first = run(multiplier, stream, product, &choice, &data);
    let again = run(multiplier, stream, product, &choice, &data);
    assert!(first == again, "two runs of {product} differ");
    let (result, vector) = first.split_at(product.result_bytes());
    let off = distance(&decode(result, product.result.number), &data.reference(product));
    if product.epilogue.has_vector() {
        let off = distance(
            &decode(vector, product.result.number),
            &data.vector_after(product),
        );
        assert!(
            off <= allowed(product),
            "the vector of {product} is off by {off:.2e}"
        );
    }
    assert!(off <= allowed(product), "{product} is off by {off:.2e}");
    worst.push(format!("{off:.1e}  {product}"));
}

fn numbers() -> [(Number, Number, Compute); 7] {
    [
        (Number::F32, Number::F32, Compute::F32),
        (Number::F32, Number::F32, Compute::Tf32),
        (Number::F64, Number::F64, Compute::F64),
        (Number::F16, Number::F16, Compute::F32),
        (Number::Bf16, Number::Bf16, Compute::F32),
        (Number::Bf16, Number::F32, Compute::F32),
        (Number::F16, Number::F32, Compute::F32),
    ]
}

#[test]
fn every_type_transposition_and_batch_multiplies() {
    let Some(gpu) = common::gpu() else { return };
    let multiplier = gpu.multiplier();
    let mut shown = Vec::new();
    for (operands, result, compute) in numbers() {
        // Extents that suit the tensor cores, and extents that do not.
        for (m, n, k, batch) in [(64, 128, 96, 1), (33, 17, 65, 1), (16, 24, 32, 3)] {
            for transposed in 0..4 {
                let mut product = Product::dense(m, n, k, operands)
                    .with_batch(batch)
                    .with_result(result)
                    .with_compute(compute);
                if transposed & 1 != 0 {
                    product = product.with_transposed_left();
                }
                if transposed & 2 != 0 {
                    product = product.with_transposed_right();
                }
                check(&multiplier, &gpu.stream, &product, &mut shown);
            }
        }
    }
    println!("{}", shown.join("\n"));
}

#[test]
fn epilogues_and_factors_follow_the_sum() {
    let Some(gpu) = common::gpu() else { return };
    let multiplier = gpu.multiplier();
    let mut shown = Vec::new();
    for (operands, result, compute) in numbers() {
        let product = Product::dense(48, 64, 80, operands)
            .with_result(result)
            .with_compute(compute);
        for scalars in [ScalarsFrom::Sum, ScalarsFrom::Device] {
            check(
                &multiplier,
                &gpu.stream,
                &product.clone().with_scalars(scalars),
                &mut shown,
            );
        }
        for epilogue in [
            Epilogue::Bias,
            Epilogue::Relu,
            Epilogue::BiasRelu,
            Epilogue::TanhGelu,
            Epilogue::BiasTanhGelu,
        ] {
            let product = product.clone().with_epilogue(epilogue);
            // The library has no epilogue for some types; then it says so, and the step has a kernel of its
            // own.
            match multiplier.search(&gpu.stream, &product, SearchLimits::default()) {
                Ok(_) => check(&multiplier, &gpu.stream, &product, &mut shown),
                Err(error @ CudaError::Product { .. }) => {
                    assert_eq!(operands, Number::F64, "{error}");
                    shown.push(error.to_string());
                }
                Err(error) => panic!("{error}"),
            }
        }
    }
    println!("{}", shown.join("\n"));
}

#[test]
fn sums_of_an_operand_come_with_the_product() {
    let Some(gpu) = common::gpu() else { return };
    let multiplier = gpu.multiplier();
    let mut shown = Vec::new();
    for (operands, result, compute) in numbers() {
        for epilogue in [Epilogue::LeftSums, Epilogue::RightSums] {
            for transposed in 0..4 {
                let mut product = Product::dense(48, 64, 160, operands)
                    .with_result(result)
                    .with_compute(compute)
                    .with_epilogue(epilogue);
                if transposed & 1 != 0 {
                    product = product.with_transposed_left();
                }
                if transposed & 2 != 0 {
                    product = product.with_transposed_right();
                }
                // The library has the sums for one of two layouts; else the step has a kernel of its own.
                let served = match epilogue {
                    Epilogue::LeftSums => product.left.transposed,
                    _ => !product.right.transposed,
                };
                match multiplier.search(&gpu.stream, &product, SearchLimits::default()) {
                    Ok(_) if served => check(&multiplier, &gpu.stream, &product, &mut shown),
                    Err(CudaError::Product { .. }) if !served => {}
                    Ok(_) => panic!("the library has {product}: its documentation is to be changed"),
                    Err(error) => panic!("{error}"),
                }
            }
        }
    }
    println!("{}", shown.join("\n"));
}

#[test]
fn rows_and_matrices_may_lie_apart_and_be_shared() {
    let Some(gpu) = common::gpu() else { return };
    let multiplier = gpu.multiplier();
    let mut shown = Vec::new();
    for number in [Number::F32, Number::Bf16] {
        // Heads of attention: [batch, tokens, heads, 16], one head after the other.
        let mut product = Product::dense(24, 40, 16, number)
            .with_batch(4)
            .with_transposed_right();
        product.left.leading = 4 * 16;
        product.left.batch_stride = 16;
        product.right.leading = 4 * 16;
        product.right.batch_stride = 16;
        product.result.leading = 48;
        product.result.batch_stride = 24 * 48;
        check(&multiplier, &gpu.stream, &product, &mut shown);
        // One right operand for all.
        let mut shared = Product::dense(24, 40, 16, number).with_batch(3);
        shared.right.batch_stride = 0;
        check(&multiplier, &gpu.stream, &shared, &mut shown);
    }
    println!("{}", shown.join("\n"));
}

/// No device has the memory for its operands.
#[test]
fn a_product_that_cannot_be_tried_is_the_first_proposal() {
    let Some(gpu) = common::gpu() else { return };
    let multiplier = gpu.multiplier();
    let product = Product::dense(1 << 24, 64, 1 << 16, Number::F32);
    let choice = multiplier.search(&gpu.stream, &product, SearchLimits::default());
    let choice = choice.unwrap();
    assert_eq!((choice.timed, choice.microseconds), (0, 0.0));
    multiplier.prepare(&product, &choice).unwrap();
}

#[test]
fn what_does_not_fit_is_refused() {
    let Some(gpu) = common::gpu() else { return };
    let multiplier = gpu.multiplier();
    let stream = &gpu.stream;
    let product = Product::dense(16, 16, 16, Number::F32);
    let choice = multiplier
        .search(stream, &product, SearchLimits::default())
        .unwrap();
    let other = Choice {
        library: "1.2.3".into(),
        ..choice.clone()
    };
    let error = multiplier.prepare(&product, &other).unwrap_err();
    assert!(
        error.to_string().contains("the algorithm is cuBLASLt 1.2.3's"),
        "{error}"
    );
    let nothing = Product::dense(16, 0, 16, Number::F32);
    let error = multiplier
        .search(stream, &nothing, SearchLimits::default())
        .unwrap_err();
    assert!(error.to_string().contains("nothing to multiply"), "{error}");
    let mut prepared = multiplier.prepare(&product, &choice).unwrap();
    let small = Arc::new(Storage::allocate(stream, 100).unwrap());
    let error = prepared
        .run(
            stream,
            &ProductArguments::new((&small, 0), (&small, 0), (&small, 0)),
        )
        .unwrap_err();
    assert!(matches!(error, CudaError::Range { size: 100, .. }), "{error}");
}
