//! Burn's own attention, trained: the losses and weights of eager, one kernel forward and one backward, and
//! no scores in memory.

use burn::module::Module;
use burn::nn::attention::{
    CrossAttention, CrossAttentionConfig, MhaInput, MultiHeadAttention, MultiHeadAttentionConfig,
    generate_autoregressive_mask,
};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::tensor::activation::softmax;
use burn::tensor::backend::Backend;
use burn::tensor::module::attention;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Bool, FloatDType, Int, Tensor};
use burn_optim::SgdConfig;
use kiln::{CompileOptions, Kiln, KilnDevice, RegionReport, StepReport};

use crate::harness::*;
use crate::models::*;

const STEPS: usize = 6;
/// A token that pads.
const PADDING: i32 = 4;
const D_MODEL: usize = 12;
const HEADS: usize = 2;

/// The function's options for causal order.
fn causal() -> AttentionModuleOptions {
    AttentionModuleOptions {
        is_causal: true,
        ..AttentionModuleOptions::default()
    }
}

/// How a program attends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    /// The module with dropout and a padding mask.
    Padded,
    /// The module with both masks and dropout.
    PaddedInOrder,
    /// The module of shared heads, with padding and dropout.
    Cross,
    /// The function.
    Plain,
    /// The function in causal order with padding, which leaves queries without a key.
    Causal,
    /// The function with padding, causal order and a bias.
    Biased,
}

#[derive(Module, Debug)]
struct Attending<B: Backend> {
    embedding: Embedding<B>,
    module: MultiHeadAttention<B>,
    cross: CrossAttention<B>,
    query: Linear<B>,
    key: Linear<B>,
    out: Linear<B>,
    #[module(skip)]
    form: Form,
}

impl<B: Backend> Attending<B> {
    fn new(form: Form, device: &B::Device) -> Self {
        let linear = || LinearConfig::new(D_MODEL, D_MODEL).init(device);
        Self {
            embedding: EmbeddingConfig::new(VOCABULARY, D_MODEL).init(device),
            module: MultiHeadAttentionConfig::new(D_MODEL, HEADS)
                .with_dropout(0.2)
                .init(device),
            cross: CrossAttentionConfig::new(D_MODEL, D_MODEL, 2 * HEADS, HEADS, D_MODEL / HEADS)
                .with_dropout(0.2)
                .init(device),
            query: linear(),
            key: linear(),
            out: LinearConfig::new(D_MODEL, CLASSES).init(device),
            form,
        }
    }

    /// The function, on heads of `x`; the values are `x` itself.
    fn function(
        &self,
        x: Tensor<B, 3>,
        mask: Option<Tensor<B, 2, Bool>>,
        bias: Option<Tensor<B, 4>>,
        options: AttentionModuleOptions,
    ) -> Tensor<B, 3> {
        let [batch, length, _] = x.dims();
        let heads = |x: Tensor<B, 3>| x.reshape([batch, length, HEADS, D_MODEL / HEADS]).swap_dims(1, 2);
        let (query, key) = (self.query.forward(x.clone()), self.key.forward(x.clone()));
        let mask = mask.map(|mask| {
            mask.reshape([batch, 1, 1, length])
                .expand([batch, HEADS, length, length])
        });
        let out = attention(heads(query), heads(key), heads(x), mask, bias, options);
        out.swap_dims(1, 2).reshape([batch, length, D_MODEL])
    }

    fn attend(&self, x: Tensor<B, 3>, padding: Tensor<B, 2, Bool>) -> Tensor<B, 3> {
        let ([batch, length, _], device) = (x.dims(), x.device());
        let input = MhaInput::self_attn(x.clone()).mask_pad(padding.clone());
        match self.form {
            Form::Padded => self.module.forward(input).context,
            Form::PaddedInOrder => {
                let order = generate_autoregressive_mask(batch, length, &device);
                self.module.forward(input.mask_attn(order)).context
            }
            Form::Cross => self.cross.forward(x.clone(), x, Some(padding)),
            Form::Plain => self.function(x, None, None, AttentionModuleOptions::default()),
            Form::Causal => self.function(x, Some(padding), None, causal()),
            Form::Biased => {
                let distance = Tensor::<B, 1, Int>::arange(0..length as i64, &device).float();
                let bias = distance
                    .reshape([1, 1, 1, length])
                    .mul_scalar(0.1)
                    .expand([batch, HEADS, length, length]);
                self.function(x, Some(padding), Some(bias), causal())
            }
        }
    }
}

impl<B: Backend> Trainable<B> for Attending<B> {
    fn logits(&self, batch: &Batch<B>) -> Tensor<B, 2> {
        let x = self.embedding.forward(batch.tokens.clone());
        let padding = batch.tokens.clone().equal_elem(PADDING);
        let x = x.clone() + self.attend(x, padding);
        self.out.forward(x.mean_dim(1).squeeze_dim(1))
    }
}

/// Operation and type of each node of the step's kernels.
fn nodes(step: &StepReport) -> Vec<(&str, &str)> {
    let kernels = &step.contract.as_ref().expect("compiled code").kernels;
    let nodes = kernels.iter().flat_map(|kernel| &kernel.nodes);
    nodes.map(|node| (node.op.as_str(), node.ty.as_str())).collect()
}

/// One kernel for attention, `gradients` for its gradient, and no other that works on scores.
fn assert_fused(report: &RegionReport, gradients: usize) {
    for step in &report.steps {
        let nodes = nodes(step);
        let count = |name: &str| nodes.iter().filter(|(op, _)| *op == name).count();
        assert_eq!(
            (count("attention"), count("attention_grad")),
            (1, gradients),
            "{}",
            step.graph
        );
        // The softmax of the logits has an exponential too, of two dimensions.
        let composed = nodes
            .iter()
            .any(|(op, ty)| *op == "exp" && ty.matches(',').count() == 3);
        assert!(!composed, "{}", step.graph);
    }
}

macro_rules! attention {
    ($($name:ident => $form:ident),* $(,)?) => {$(
        #[test]
        fn $name() {
            let reports = compare!(
                Compiled,
                Attending,
                |device| Attending::new(Form::$form, device),
                SgdConfig::new().init(),
                STEPS,
                [Cpu]
            );
            reports.iter().for_each(|report| assert_fused(report, 1));
        }
    )*};
}

attention! {
    module_with_padding => Padded,
    module_with_both_masks => PaddedInOrder,
    shared_heads => Cross,
    function => Plain,
    function_in_causal_order => Causal,
    function_with_bias => Biased,
}

/// Numbers between -1 and 1.
fn waves<B: Backend>(shape: [usize; 4], seed: i64, device: &B::Device) -> Tensor<B, 4> {
    let count = shape.iter().product::<usize>() as i64;
    let numbers = Tensor::<B, 1, Int>::arange(seed..seed + count, device).float();
    (numbers * 0.37).sin().reshape(shape)
}

/// Without autodiff Burn hands the function over whole.
#[test]
fn function_in_inference() {
    let _turn = turn();
    let device = KilnDevice::cpu();
    let heads = |seed| waves::<Kiln>([2, 2, 5, 4], seed, &device);
    let (query, key, value) = (heads(1), heads(50), heads(200));
    let bias = heads(7).slice([0..2, 0..2, 0..5, 0..1]).expand([2, 2, 5, 5]);
    let seen = Tensor::<Kiln, 1, Int>::arange(0..2 * 2 * 5 * 5, &device);
    let mask = seen.lower_elem(10).reshape([2, 2, 5, 5]);
    let run = || {
        let (query, key, value) = (query.clone(), key.clone(), value.clone());
        attention(
            query,
            key,
            value,
            Some(mask.clone()),
            Some(bias.clone()),
            causal(),
        )
    };
    let expected = run().into_data();
    let mut region = kiln::compile(CompileOptions::default());
    let found = region.run(run).unwrap().into_data();
    found.assert_approx_eq::<f32>(&expected, burn::tensor::Tolerance::rel_abs(1e-5, 1e-6));
    let report = region.report();
    assert_fused(&report, 0);
    let step = &report.steps[0];
    assert!(nodes(step).iter().all(|(op, _)| *op != "exp"), "{}", step.graph);
}

type Heads = Tensor<Compiled, 4>;
/// Attention of queries, keys and values.
type Way<'a> = dyn Fn(Heads, Heads, Heads) -> Heads + 'a;

/// Attention computed in a type of 16 bits, forward and backward, from parameters in f32: one kernel each,
/// with the results of f32 to within the type's roundings.
#[test]
fn sixteen_bits() {
    let _turn = turn();
    let device = KilnDevice::cpu();
    let heads = |seed| waves::<Compiled>([2, 2, 9, 8], seed, &device).require_grad();
    let (query, key, value) = (heads(1), heads(50), heads(200));
    let padding = Tensor::<Compiled, 1, Int>::arange(0..2 * 9, &device).greater_elem(15);
    let mask = || padding.clone().reshape([2, 1, 1, 9]).expand([2, 2, 9, 9]);
    let composed = |q: Heads, k: Heads, v: Heads| {
        let scores = q.matmul(k.transpose()).div_scalar(8f32.sqrt());
        softmax(scores.mask_fill(mask(), -1e4), 3).matmul(v)
    };
    let function = |q: Heads, k: Heads, v: Heads| attention(q, k, v, Some(mask()), None, causal());
    let run = |dtype: FloatDType, of: &Way<'_>| {
        let cast = |x: &Heads| x.clone().cast(dtype);
        let out = of(cast(&query), cast(&key), cast(&value)).cast(FloatDType::F32);
        let grads = (out.clone() * value.clone().detach()).sum().backward();
        let gradient = |x: &Heads| x.grad(&grads).unwrap();
        [out.inner(), gradient(&query), gradient(&key), gradient(&value)]
    };
    let forms: [(&str, &Way<'_>); 2] = [("composed", &composed), ("function", &function)];
    for (name, form) in forms {
        let expected =
            run(FloatDType::F32, form).map(|x| x.into_data().convert::<f64>().to_vec::<f64>().unwrap());
        for (dtype, tolerance) in [(FloatDType::F16, 2e-3), (FloatDType::BF16, 2e-2)] {
            let mut region = kiln::compile(CompileOptions::default());
            let found = region.run(|| run(dtype, form)).unwrap();
            for (found, expected) in found.into_iter().zip(&expected) {
                let found = found.into_data().convert::<f64>().to_vec::<f64>().unwrap();
                let error = relative_error(&found, expected, 0.0);
                assert!(error <= tolerance, "{name} {dtype:?}: {error}");
            }
            assert_fused(&region.report(), 1);
        }
    }
}
