//! Convolutions of few pixels with large weights, such as the last layers of a network for small images.
//!
//! In such a convolution nearly all memory traffic is the weight. The other kernels first bring the weight
//! into an order of their own, which pays only if every element is used often, and their tiles, whose rows
//! are the pixels of one line, are low. Here the few windows are written out as the rows of a matrix, in
//! the order of the weight's elements (im2col), and the convolution and its gradients are matrix products
//! with the weight as it lies in memory. The input gradient is a product first, whose columns are then
//! added up over the windows that contain a place (col2im).
//!
//! A convolution of single elements with a stride (where a network halves its image beside a block) skips
//! most of the image. However many pixels there are, it is a product once the remaining pixels are
//! gathered.

use super::correlate;
use super::walk::Direction;
use super::{ConvSpec, Geometry, Image, ImageAxis, PixelPlace, Spatial, WeightGradSpec};
use crate::isa::Isa;
use crate::kernels::element::Storage;
use crate::kernels::frame::Frame;
use crate::kernels::gemm::{self, Axis, Epilogue, GemmSpec, Operand};
use crate::kernels::{KernelText, Param, Width, indent, round_up, vector};
use crate::policy::LARGE_WEIGHT;

/// Most result pixels, in general and for a convolution with a stride, which has no better kernel.
const MAX_PIXELS: [usize; 2] = [128, 400];

/// Whether the convolution is of the kind.
fn fits(g: &Geometry) -> bool {
    let strided = g.stride != [1; 3];
    let has_few_pixels = g.images * g.output.iter().product::<usize>() <= MAX_PIXELS[usize::from(strided)];
    let kind = if g.taps() > 1 { has_few_pixels } else { strided };
    kind && g.groups == 1 && g.weight_len() * 4 >= LARGE_WEIGHT
}

/// The result pixels, the elements of a window, and the bytes of the matrices that are written out.
struct Sizes {
    pixels: usize,
    window: usize,
    /// Windows, or their gradients: `[pixel][channel][kernel element]`.
    windows: usize,
    /// The output's gradient: `[pixel][channel]`.
    grads: usize,
}

impl Sizes {
    fn new(g: &Geometry, lanes: usize) -> Self {
        let pixels = g.images * g.output.iter().product::<usize>();
        let window = g.in_channels * g.taps();
        // A vector may run over the end.
        let bytes = |count: usize| round_up((count + lanes) * 4, 64);
        Self {
            pixels,
            window,
            windows: bytes(pixels * window),
            grads: bytes(pixels * g.out_channels),
        }
    }
}

/// The forward convolution or the input gradient, if it is of this kind.
pub(super) fn correlate(spec: &ConvSpec<'_>, direction: Direction, isa: Isa) -> Option<KernelText> {
    let g = &spec.geometry;
    if !fits(g) {
        return None;
    }
    let lanes = vector::lanes(isa);
    let sizes = Sizes::new(g, lanes);
    Some(match direction {
        Direction::Forward => forward(spec, &sizes, isa),
        Direction::InputGrad => input_gradient(spec, &sizes, lanes, isa),
    })
}

fn forward(spec: &ConvSpec<'_>, sizes: &Sizes, isa: Isa) -> KernelText {
    let (frame, g) = (spec.frame(), &spec.geometry);
    let k = sizes.window;
    let by_channel = spec.epilogue.axis(g.output) == Some(ImageAxis::Channel);
    let consume = |r: &gemm::Result<'_>| {
        let [image, z, y, x] = place_of(r.row, g.output);
        let place = PixelPlace {
            width: r.width,
            image: &image,
            at: [&z, &y, &x],
            channel: r.col,
        };
        (spec.epilogue.consume)(&place, r.value)
    };
    let product = product(
        &frame,
        [sizes.pixels, g.out_channels, k],
        matrix("few_left", k as i64, 1, spec.storage),
        matrix("few_right", k as i64, 1, spec.storage),
        Epilogue::custom(by_channel.then_some(Axis::Depth), consume),
        isa,
    );
    let run = frame.run(g.is_small());
    let calls = run(&format!("{}_windows", frame.name), sizes.pixels)
        + &call(
            &frame,
            "(const float *)workspace",
            &format!("({})", spec.weight),
            sizes.windows,
        );
    let source = frame.head(&about(g), "") + &windows(&frame, g, &spec.image, 0) + &product.source;
    finish(&frame, source, &calls, sizes.windows, product)
}

fn input_gradient(spec: &ConvSpec<'_>, sizes: &Sizes, lanes: usize, isa: Isa) -> KernelText {
    let (frame, g) = (spec.frame(), &spec.geometry);
    let (k, o) = (sizes.window, g.out_channels);
    let grads = Grads::new(&frame, g, &spec.image, sizes.windows);
    let product = product(
        &frame,
        [sizes.pixels, k, o],
        matrix("few_left", grads.row, 1, spec.storage),
        matrix("few_right", 1, k as i64, spec.storage),
        Epilogue::store("few_out", &[], k as i64, 1),
        isa,
    );
    let run = frame.run(g.is_small());
    let name = frame.name;
    let at = sizes.windows + sizes.grads;
    let calls = grads.call(&frame, g)
        + &call(&frame, &grads.base, &format!("({})", spec.weight), at)
        + &run(
            &format!("{name}_places"),
            g.images * g.input.iter().product::<usize>(),
        );
    let source = frame.head(&about(g), "") + grads.source() + &product.source + &places(spec, sizes, lanes);
    finish(&frame, source, &calls, at, product)
}

/// The weight gradient, if the convolution is of this kind.
pub(super) fn weight_gradient(spec: &WeightGradSpec<'_>, isa: Isa) -> Option<KernelText> {
    let (frame, g) = (spec.frame(), &spec.geometry);
    if !fits(g) {
        return None;
    }
    let sizes = Sizes::new(g, vector::lanes(isa));
    let (k, o) = (sizes.window, g.out_channels);
    let consume =
        |r: &gemm::Result<'_>| (spec.consume)(r.width, &format!("({} * {k} + {})", r.row, r.col), r.value);
    let grads = Grads::new(&frame, g, &spec.output_grad, sizes.windows);
    let product = product(
        &frame,
        [o, k, sizes.pixels],
        matrix("few_left", 1, grads.row, spec.storage),
        matrix("few_right", 1, k as i64, spec.storage),
        Epilogue::custom(Some(Axis::Depth), consume),
        isa,
    );
    let run = frame.run(g.is_small());
    let name = frame.name;
    let at = sizes.windows + sizes.grads;
    let calls = run(&format!("{name}_windows"), sizes.pixels)
        + &grads.call(&frame, g)
        + &call(&frame, &grads.base, "(const float *)workspace", at);
    let source =
        frame.head(&about(g), "") + &windows(&frame, g, &spec.input, 0) + grads.source() + &product.source;
    Some(finish(&frame, source, &calls, at, product))
}

/// What a kernel works on, for the comment above it.
fn about(g: &Geometry) -> String {
    format!(
        "{} images of {:?} x {} channels to {} pixels of {}, windows written out.",
        g.images,
        g.input,
        g.in_channels,
        g.images * g.output.iter().product::<usize>(),
        g.out_channels
    )
}

/// The kernel `name_product` of `few_left`, `few_right`, the parameters, and `few_out`, the start of the
/// workspace.
fn product(
    frame: &Frame<'_>,
    [m, n, k]: [usize; 3],
    a: Operand<'_>,
    b: Operand<'_>,
    epilogue: Epilogue<'_>,
    isa: Isa,
) -> KernelText {
    let own = [
        ("const float *", "few_left"),
        ("const float *", "few_right"),
        ("float *", "few_out"),
    ];
    let own = own.map(|(ctype, name)| Param::new(ctype, name));
    let spec = GemmSpec {
        name: format!("{}_product", frame.name),
        comment: format!("[{m}, {k}] x [{k}, {n}]"),
        batch: 1,
        m,
        n,
        k,
        a,
        b,
        epilogue,
        params: own.into_iter().chain(frame.params.iter().cloned()).collect(),
        threads: frame.threads,
    };
    gemm::emit(spec, isa)
}

/// The matrix of f32 at `pointer`, whose elements come from tensors that are stored as `storage` says.
fn matrix(pointer: &str, free: i64, depth: i64, storage: Storage) -> Operand<'static> {
    Operand::strided(pointer, &[], free, depth).standing_for(storage)
}

/// The call of [`product`] with its own workspace at `at`.
fn call(frame: &Frame<'_>, left: &str, right: &str, at: usize) -> String {
    let params: String = frame
        .params
        .iter()
        .map(|param| format!("{}, ", param.name))
        .collect();
    format!(
        "    {}_product(rt, {left}, {right}, (float *)workspace, {params}workspace + {at});\n",
        frame.name
    )
}

fn finish(frame: &Frame<'_>, source: String, calls: &str, at: usize, product: KernelText) -> KernelText {
    let mut kernel = frame.finish(source, calls, at + product.workspace_bytes);
    kernel.helpers = product.helpers;
    kernel
}

/// C expressions of image, depth, height and width of pixel number `pixel`.
fn place_of(pixel: &str, [depth, height, width]: Spatial) -> [String; 4] {
    let plane = height * width;
    [
        format!("({pixel} / {})", depth * plane),
        format!("({pixel} / {plane} % {depth})"),
        format!("({pixel} / {width} % {height})"),
        format!("({pixel} % {width})"),
    ]
}

/// `name_windows(ctx, begin, end, thread)`: writes out the windows of some pixels, zero where they are
/// outside.
fn windows(frame: &Frame<'_>, g: &Geometry, image: &Image<'_>, at: usize) -> String {
    let [kz, ky, kx] = g.kernel;
    let (channels, taps) = (g.in_channels, g.taps());
    let [number, pz, py, px] = place_of("pixel", g.output);
    let load = (image.load)(&PixelPlace {
        width: Width::Scalar,
        image: "image",
        at: ["z", "y", "x"],
        channel: "c",
    });
    let inside = |axis: &str, place: &str, d: usize| {
        format!(
            "const int64_t {axis} = {place} * {} - {} + t{axis} * {};\nconst int inside_{axis} = {axis} >= 0 && {axis} < {};\n",
            g.stride[d], g.pad[d], g.dilation[d], g.input[d]
        )
    };
    let body = format!(
        "for (int64_t pixel = begin; pixel < end; pixel++) {{\n    const int64_t image = {number};\n    float *to = (float *)(args->workspace + {at}) + pixel * {};\n    \
         for (int64_t tz = 0; tz < {kz}; tz++) {{\n{}        for (int64_t ty = 0; ty < {ky}; ty++) {{\n{}            for (int64_t tx = 0; tx < {kx}; tx++, to++) {{\n{}                \
         if (inside_z && inside_y && inside_x)\n                    for (int64_t c = 0; c < {channels}; c++) to[c * {taps}] = {load};\n                else\n                    \
         for (int64_t c = 0; c < {channels}; c++) to[c * {taps}] = 0.0f;\n            }}\n        }}\n    }}\n}}\n",
        channels * taps,
        indent(&inside("z", &pz, 0), 8),
        indent(&inside("y", &py, 1), 12),
        indent(&inside("x", &px, 2), 16),
    );
    frame.part("Windows as rows.", "windows", &body)
}

/// The output's gradient as the rows of a matrix.
struct Grads {
    /// C expression of the matrix.
    base: String,
    /// Elements between rows.
    row: i64,
    /// The function that copies rows `begin..end`, if they are not read in place.
    copy: Option<String>,
}

impl Grads {
    /// Copied to `at` in the workspace, unless the pixels lie in memory as rows.
    fn new(frame: &Frame<'_>, g: &Geometry, image: &Image<'_>, at: usize) -> Self {
        match image.plain() {
            Some((pointer, strides))
                if strides[4] == 1 && correlate::are_dense(image, g.images, g.output) =>
            {
                Self {
                    base: format!("({pointer})"),
                    row: strides[3],
                    copy: None,
                }
            }
            _ => Self {
                base: format!("(const float *)(workspace + {at})"),
                row: g.out_channels as i64,
                copy: Some(copy_grads(frame, g, image, at)),
            },
        }
    }

    /// The call of the copy.
    fn call(&self, frame: &Frame<'_>, g: &Geometry) -> String {
        let pixels = g.images * g.output.iter().product::<usize>();
        let call = |_: &String| frame.run(g.is_small())(&format!("{}_grads", frame.name), pixels);
        self.copy.as_ref().map_or_else(String::new, call)
    }

    /// The definition of the copy.
    fn source(&self) -> &str {
        self.copy.as_deref().unwrap_or_default()
    }
}

/// `name_grads(ctx, begin, end, thread)`: copies the output's gradient at some pixels.
fn copy_grads(frame: &Frame<'_>, g: &Geometry, image: &Image<'_>, at: usize) -> String {
    let channels = g.out_channels;
    let [number, z, y, x] = place_of("pixel", g.output);
    let load = (image.load)(&PixelPlace {
        width: Width::Scalar,
        image: &number,
        at: [&z, &y, &x],
        channel: "c",
    });
    let body = format!(
        "for (int64_t pixel = begin; pixel < end; pixel++)\n    for (int64_t c = 0; c < {channels}; c++) ((float *)(args->workspace + {at}))[pixel * {channels} + c] = \
         {load};\n"
    );
    frame.part("Pixels of the output's gradient as rows.", "grads", &body)
}

/// `name_places(ctx, begin, end, thread)`: for some places of the input, the sums over the windows that
/// contain them.
fn places(spec: &ConvSpec<'_>, sizes: &Sizes, lanes: usize) -> String {
    let (frame, g) = (spec.frame(), &spec.geometry);
    let [kz, ky, kx] = g.kernel;
    let (channels, taps) = (g.in_channels, g.taps());
    let [number, z, y, x] = place_of("unit", g.input);
    let consume = |width| {
        let place = PixelPlace {
            width,
            image: "image",
            at: ["z", "y", "x"],
            channel: "c",
        };
        indent(&(spec.epilogue.consume)(&place, "sum"), 8)
    };
    let vectors = if spec.epilogue.axis(g.input) == Some(ImageAxis::Channel) {
        format!(
            "    for (; c + {lanes} <= {channels}; c += {lanes}) {{\n        vf sum = {{0}};\n        for (int64_t e = 0; e < count; e++) sum += vf_load_stride(from[e] + c * \
             {taps}, {taps});\n{}    }}\n",
            consume(Width::Vector)
        )
    } else {
        String::new()
    };
    let most: usize = (0..3).map(|d| g.windows_of_a_place(d)).product();
    let reached = |axis: &str, d: usize| {
        format!(
            "const int64_t {axis}1 = {axis} + {} - t{axis} * {}, {axis}0 = {axis}1 / {stride};\nif ({axis}1 < 0 || {axis}1 % {stride} != 0 || {axis}0 >= {}) continue;\n",
            g.pad[d],
            g.dilation[d],
            g.output[d],
            stride = g.stride[d]
        )
    };
    let [depth, height, width] = g.output;
    let body = format!(
        "for (int64_t unit = begin; unit < end; unit++) {{\n    const int64_t image = {number}, z = {z}, y = {y}, x = {x};\n    /* The columns of windows that are this place. \
         */\n    const float *from[{most}];\n    int64_t count = 0, c = 0;\n    for (int64_t tz = 0; tz < {kz}; tz++) {{\n{}        for (int64_t ty = 0; ty < {ky}; ty++) \
         {{\n{}            for (int64_t tx = 0; tx < {kx}; tx++) {{\n{}                const int64_t pixel = ((image * {depth} + z0) * {height} + y0) * {width} + \
         x0;\n                from[count++] = (const float *)args->workspace + pixel * {} + (tz * {ky} + ty) * {kx} + tx;\n            }}\n        }}\n    }}\n{vectors}    for (; c \
         < {channels}; c++) {{\n        float sum = 0.0f;\n        for (int64_t e = 0; e < count; e++) sum += from[e][c * {taps}];\n{}    }}\n}}\n",
        indent(&reached("z", 0), 8),
        indent(&reached("y", 1), 12),
        indent(&reached("x", 2), 16),
        sizes.window,
        consume(Width::Scalar),
    );
    frame.part("Sums over the windows that contain a place.", "places", &body)
}
