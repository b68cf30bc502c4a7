//! The head of a JPEG file: how large it is, and whether it is of the kind that nearly all photographs are.

/// Where a file that is whole has its last marker.
const TAIL: usize = 1024;

/// Markers, the second byte of two.
mod marker {
    pub const START: u8 = 0xd8;
    pub const END: u8 = 0xd9;
    pub const BASELINE: u8 = 0xc0;
    /// Frames of other kinds, but for the three markers among these numbers that begin no frame.
    pub const FRAMES: std::ops::RangeInclusive<u8> = 0xc1..=0xcf;
    pub const NO_FRAMES: [u8; 3] = [0xc4, 0xc8, 0xcc];
    pub const SCAN: u8 = 0xda;
    pub const ADOBE: u8 = 0xee;
}

/// Width and height of a JPEG that is baseline, complete, of 8 bits and one scan, grey or of brightness and
/// two colours of its resolution, of half of that across, or of half in both directions. Decoders in hardware
/// take these. None for all other files; what is wrong with a damaged one is for a whole decoder to say.
pub(super) fn plain_size(bytes: &[u8]) -> Option<(usize, usize)> {
    let mut segments = Segments::of(bytes)?;
    let mut frame = None;
    loop {
        let (code, segment) = segments.next()?;
        match code {
            marker::BASELINE => frame = Some(Frame::read(segment)?),
            marker::SCAN => {
                let frame: Frame = frame?;
                let is_whole = *segment.first()? == frame.components;
                let tail = &segments.rest[segments.rest.len().saturating_sub(TAIL)..];
                return (is_whole && has_end(tail)).then_some((frame.width, frame.height));
            }
            // The last byte says how colours are stored; 1 is brightness and two colours.
            marker::ADOBE if segment.starts_with(b"Adobe") && segment.get(11) != Some(&1) => return None,
            _ if marker::FRAMES.contains(&code) && !marker::NO_FRAMES.contains(&code) => return None,
            _ => {}
        }
    }
}

/// Whether a JPEG ends within its scans: a decoder would make up the rest of the picture. What is wrong with
/// a file that ends before them is for a decoder to say.
pub(super) fn is_cut_off(bytes: &[u8]) -> bool {
    Segments::of(bytes).is_some_and(|mut segments| {
        // A thumbnail in front of the scans has an end of its own.
        segments.any(|(code, _)| code == marker::SCAN) && !has_end(segments.rest)
    })
}

fn has_end(bytes: &[u8]) -> bool {
    bytes.windows(2).rev().any(|pair| pair == [0xff, marker::END])
}

/// The segments of a JPEG, each with its marker; behind that of a scan comes the scan.
struct Segments<'a> {
    rest: &'a [u8],
}

impl<'a> Segments<'a> {
    fn of(bytes: &'a [u8]) -> Option<Self> {
        let rest = bytes.strip_prefix(&[0xff, marker::START])?;
        Some(Self { rest })
    }
}

impl<'a> Iterator for Segments<'a> {
    type Item = (u8, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        // Any number of 0xff may stand in front of a marker.
        let fill = self.rest.iter().take_while(|&&byte| byte == 0xff).count();
        let (&code, behind) = self.rest.get(fill..).filter(|_| fill > 0)?.split_first()?;
        let length = usize::from(u16::from_be_bytes(*behind.first_chunk()?));
        let segment = behind.get(2..length)?;
        self.rest = &behind[length..];
        Some((code, segment))
    }
}

struct Frame {
    width: usize,
    height: usize,
    components: u8,
}

impl Frame {
    /// The frame, if it is plain.
    fn read(segment: &[u8]) -> Option<Self> {
        let [precision, h0, h1, w0, w1, count, components @ ..] = segment else {
            return None;
        };
        let (components, _) = components.as_chunks::<3>();
        let sampling: Vec<u8> = components.iter().map(|component| component[1]).collect();
        let names: Vec<u8> = components.iter().map(|component| component[0]).collect();
        let is_plain = match sampling[..] {
            [_] => true,
            [first, 0x11, 0x11] => matches!(first, 0x11 | 0x21 | 0x22) && names != *b"RGB",
            _ => false,
        };
        let frame = Self {
            width: usize::from(u16::from_be_bytes([*w0, *w1])),
            height: usize::from(u16::from_be_bytes([*h0, *h1])),
            components: *count,
        };
        let fits = *precision == 8 && usize::from(*count) == components.len();
        (fits && is_plain && frame.width > 0 && frame.height > 0).then_some(frame)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use image::codecs::jpeg::JpegEncoder;

    fn encoded(width: usize, height: usize, colour: image::ExtendedColorType, channels: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        let pixels = vec![99; width * height * channels];
        let mut encoder = JpegEncoder::new(&mut bytes);
        encoder
            .encode(&pixels, width as u32, height as u32, colour)
            .expect("the encoder takes such pictures");
        bytes
    }

    fn rgb() -> Vec<u8> {
        encoded(37, 21, image::ExtendedColorType::Rgb8, 3)
    }

    /// Where the frame's segment begins, behind its marker and length.
    fn frame(bytes: &[u8]) -> usize {
        let found = bytes.windows(2).position(|pair| pair == [0xff, marker::BASELINE]);
        found.expect("the encoder writes baseline files") + 4
    }

    #[test]
    fn plain_files_have_their_size() {
        assert_eq!(plain_size(&rgb()), Some((37, 21)));
        let grey = encoded(8, 300, image::ExtendedColorType::L8, 1);
        assert_eq!(plain_size(&grey), Some((8, 300)));
        // Fill bytes in front of a marker, and bytes behind the end.
        let mut padded = rgb();
        padded.insert(2, 0xff);
        padded.extend([0; 100]);
        assert_eq!(plain_size(&padded), Some((37, 21)));
    }

    #[test]
    fn files_that_end_early_are_cut_off() {
        let whole = rgb();
        assert!(!is_cut_off(&whole));
        for length in [whole.len() - 2, whole.len() - 9] {
            assert!(is_cut_off(&whole[..length]), "{length} of {} bytes", whole.len());
        }
        // A thumbnail in front has an end, too.
        let thumbnail = whole.clone();
        let mut with_thumbnail = whole[..2].to_vec();
        with_thumbnail.extend([0xff, 0xe1]);
        with_thumbnail.extend((thumbnail.len() as u16 + 2).to_be_bytes());
        with_thumbnail.extend(&thumbnail);
        with_thumbnail.extend(&whole[2..]);
        assert!(!is_cut_off(&with_thumbnail));
        assert!(is_cut_off(&with_thumbnail[..with_thumbnail.len() - 9]));
        assert!(!is_cut_off(b"\x89PNG\r\n\x1a\n"));
    }

    #[test]
    fn other_files_are_none() {
        let changed = |at: usize, to: u8| {
            let mut bytes = rgb();
            let frame = frame(&bytes);
            bytes[frame - 4 + at] = to;
            plain_size(&bytes)
        };
        assert_eq!(changed(0, 0xff), Some((37, 21)), "nothing is changed");
        assert_eq!(changed(1, 0xc2), None, "progressive");
        assert_eq!(changed(4, 12), None, "12 bits");
        assert_eq!(
            (changed(5, 0), changed(6, 0)),
            (Some((37, 21)), None),
            "a height that comes later"
        );
        assert_eq!(changed(11, 0x41), None, "colours of a quarter of the resolution");
        assert_eq!(changed(11, 0x12), None, "colours of half of the rows only");
        assert_eq!(changed(11, 0x22), Some((37, 21)));
        assert_eq!(changed(14, 0x12), None, "colours of two resolutions");
        let mut named = rgb();
        let at = frame(&named);
        for (component, name) in b"RGB".iter().enumerate() {
            named[at + 6 + 3 * component] = *name;
        }
        assert_eq!(plain_size(&named), None, "red, green and blue");
        let mut adobe = rgb();
        adobe.splice(2..2, *b"\xff\xee\x00\x0eAdobe\x00\x64\x00\x00\x00\x00\x00");
        assert_eq!(plain_size(&adobe), None, "red, green and blue, by Adobe's marker");
        adobe[2 + 4 + 11] = 1;
        assert_eq!(plain_size(&adobe), Some((37, 21)));
    }

    #[test]
    fn damaged_files_are_none() {
        let whole = rgb();
        for length in 0..whole.len() - 1 {
            assert_eq!(
                plain_size(&whole[..length]),
                None,
                "{length} bytes of {}",
                whole.len()
            );
        }
        for (at, byte) in [(0, 0), (1, 0), (2, 7), (4, 0xff), (5, 1)] {
            let mut bytes = whole.clone();
            bytes[at] = byte;
            assert_eq!(plain_size(&bytes), None, "byte {at} is {byte}");
        }
        assert_eq!(plain_size(b"\x89PNG\r\n\x1a\n"), None);
    }
}
