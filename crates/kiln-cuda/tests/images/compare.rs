//! Comparisons of what was generated, on the host and on a GPU.

use std::sync::Arc;

use kiln_compiler::Options;
use kiln_cuda::code::CallKind;
use kiln_cuda::execute::{CudaExecutable, Gpu, NothingOutside};
use kiln_cuda::runtime::Storage;
use kiln_cuda::testing::host::Differential;
use kiln_graph::{Graph, HostTensor, TensorType, interpret_f64};

/// A comparison where products may round their operands, to within some roundings of 10 bits.
pub fn rounding(graph: &Graph) -> Differential<'_> {
    let mut comparison = Differential::new(graph);
    comparison.target.tf32 = true;
    let (tensors, scalars) = comparison.given();
    let expected = interpret_f64(graph, tensors, scalars).unwrap();
    let largest = expected.iter().map(|tensor| {
        let values = tensor.to_f64s();
        2e-3 * values.iter().fold(0.0, |most: f64, x| most.max(x.abs()))
    });
    let tolerances: Vec<f64> = largest.collect();
    comparison.tolerances(&tolerances)
}

/// What `graph` gives on a GPU, in two runs of equal bits, and the names of its kernels.
pub fn on_gpu(
    gpu: &Arc<Gpu>,
    comparison: &Differential<'_>,
    graph: &Graph,
) -> (Vec<HostTensor>, Vec<String>) {
    let executable = CudaExecutable::new(graph, &Options::default(), &comparison.target, gpu).unwrap();
    let upload = |tensor: &HostTensor| gpu.upload(tensor.bytes()).unwrap();
    let inputs: Vec<_> = comparison.given().0.iter().map(upload).collect();
    let types = graph.outputs.iter().map(|output| graph.ty(output.value));
    let run = || -> Vec<HostTensor> {
        let types = types.clone();
        let memory = |ty: &TensorType| gpu.upload(&vec![0xff; ty.bytes()]).unwrap();
        let outputs: Vec<_> = types.clone().map(memory).collect();
        executable
            .run(&inputs, &outputs, &[], &NothingOutside, false)
            .unwrap();
        let read = |(ty, storage): (&TensorType, &Arc<Storage>)| {
            let mut bytes = vec![0; ty.bytes()];
            gpu.download(storage, &mut bytes).unwrap();
            HostTensor::from_bytes(ty.clone(), bytes).unwrap()
        };
        types.zip(&outputs).map(read).collect()
    };
    let (first, second) = (run(), run());
    for (one, other) in first.iter().zip(&second) {
        assert_eq!(one.bytes(), other.bytes(), "two runs have other bits\n{graph}");
    }
    let kernels = &executable.contract().kernels;
    (first, kernels.iter().map(|kernel| kernel.name.clone()).collect())
}

/// What computes each kernel of a step: the constants by which the templates are told apart.
pub fn ways(comparison: &Differential<'_>) -> Vec<&'static str> {
    let step = comparison.compile().unwrap();
    let calls = step.code.calls.iter().map(|call| match &call.kind {
        CallKind::Product { .. } => "product",
        CallKind::Launch { function, .. } => {
            let text = &step.code.functions[*function].text.helpers;
            let has = |constant: &str| text.contains(&format!("constexpr int {constant} ="));
            match () {
                () if has("ROW_WARPS") && has("HOP0") => "tensor tiles",
                () if has("ROW_WARPS") => "tensor tiles of a weight",
                () if text.contains("packed_element(from[") => "tensor pack",
                () if has("BANDS") && has("PARTS") => "bands of a weight",
                () if has("BANDS") => "bands",
                () if has("EACH") || has("PLACES") => "copy",
                () if has("PIXEL_TILES") && has("HOP0") => "tiles",
                () if has("ROW_TILES") => "tiles of a weight",
                () if has("CHANNEL_TILES") => "depthwise weight",
                () if has("OUT_PADDED") && has("VECTOR") => "depthwise",
                () if has("OUT_PADDED") => "pack",
                () if has("CHUNKS") => "join",
                () if has("OUT") => "direct",
                () => "pool",
            }
        }
        other => panic!("{other:?}"),
    });
    calls.collect()
}
