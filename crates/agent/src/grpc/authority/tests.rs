use std::time::Duration;

use http::{HeaderMap, Request, Response};
use prometheus::IntGauge;
use proptest::prelude::*;
use tokio::io::AsyncWriteExt as _;
use tokio::net::UnixStream;

use super::*;
use crate::grpc::connection::Connection;
use crate::unix::Socket;

/// The authority that the C library and Go clients with their own dialer send.
const PATH: &str = "%2Frun%2Fcadastre%2Fagent.sock";

/// Returns the whole output of the decoder for an input that arrives in these pieces.
fn through(pieces: &[&[u8]]) -> Vec<u8> {
    let mut decoder = AuthorityDecoder::new();
    let (mut buffer, mut all) = (BytesMut::new(), Vec::new());
    for piece in pieces {
        buffer.extend_from_slice(piece);
        while let Some(decoded) = decoder.decode(&mut buffer).unwrap() {
            all.extend(decoded);
        }
    }
    while let Some(decoded) = decoder.decode_eof(&mut buffer).unwrap() {
        all.extend(decoded);
    }
    all
}

fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags, 0, 0, 0, 1], payload].concat()
}

fn stream(frames: &[Vec<u8>]) -> Vec<u8> {
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".as_slice(),
        &frames.concat(),
    ]
    .concat()
}

/// Encodes an HPACK integer that begins in the last `bits` bits of a byte. `first` has the other bits of that byte.
fn number(first: u8, bits: u32, number: usize) -> Vec<u8> {
    let most = (1 << bits) - 1;
    if number < most {
        return vec![first | u8::try_from(number).unwrap()];
    }
    let mut bytes = vec![first | u8::try_from(most).unwrap()];
    let mut left = number - most;
    while left >= 0x80 {
        bytes.push(u8::try_from(left & 0x7f).unwrap() | 0x80);
        left >>= 7;
    }
    bytes.push(u8::try_from(left).unwrap());
    bytes
}

fn text(first: u8, bytes: &[u8]) -> Vec<u8> {
    [number(first, 7, bytes.len()), bytes.to_owned()].concat()
}

/// For each kind of literal: its first byte, and in how many of the byte's last bits the index begins.
const LITERALS: [(u8, u32); 3] = [(0x40, 6), (0x00, 4), (0x10, 4)];

/// Returns the three encodings of the name `:authority` in a literal of HPACK.
fn names((first, bits): (u8, u32)) -> [Vec<u8>; 3] {
    [
        number(first, bits, INDEX),
        [&[first], text(0, PLAIN).as_slice()].concat(),
        [&[first], text(0x80, HUFFMAN).as_slice()].concat(),
    ]
}

/// Generates an `:authority` field in any encoding. Returns the field as sent, and as the decoder should pass it on.
fn authority() -> impl Strategy<Value = (Vec<u8>, Vec<u8>)> {
    let value = prop::collection::vec(any::<u8>(), 0..300);
    (0..3usize, 0..3usize, any::<bool>(), value).prop_map(|(kind, way, huffman, value)| {
        let name = names(LITERALS[kind])[way].clone();
        let sent = text(if huffman { 0x80 } else { 0 }, &value);
        let passed = if value.is_empty() {
            sent.clone()
        } else {
            vec![1, NAME]
        };
        ([name.clone(), sent].concat(), [name, passed].concat())
    })
}

fn other() -> impl Strategy<Value = Vec<u8>> {
    let bytes = || prop::collection::vec(any::<u8>(), 0..200);
    let indexed = (1..70_000usize).prop_map(|index| number(0x80, 7, index));
    let resized = (0..70_000usize).prop_map(|size| number(0x20, 5, size));
    let named = (0..3usize, 2..300usize, bytes()).prop_map(|(kind, index, value)| {
        let (first, bits) = LITERALS[kind];
        [number(first, bits, index), text(0, &value)].concat()
    });
    let spelt = (0..3usize, bytes(), bytes()).prop_map(|(kind, name, value)| {
        [
            &[LITERALS[kind].0],
            text(0, &name).as_slice(),
            &text(0x80, &value),
        ]
        .concat()
    });
    prop_oneof![indexed, resized, named, spelt]
}

/// Generates a HEADERS frame with a complete header block, with or without priority and padding. Returns the frame as
/// sent, and as the decoder should pass it on.
fn headers() -> impl Strategy<Value = (Vec<u8>, Vec<u8>)> {
    let fields = prop_oneof![other().prop_map(|it| (it.clone(), it)), authority()];
    let fields = prop::collection::vec(fields, 0..12);
    (fields, any::<Option<[u8; 5]>>(), any::<Option<u8>>()).prop_map(|(fields, first, pad)| {
        let flags = END_HEADERS
            | if first.is_some() { PRIORITY } else { 0 }
            | if pad.is_some() { PADDED } else { 0 };
        let whole = |block: Vec<u8>| {
            let pads: Vec<u8> = pad.into_iter().collect();
            let end = vec![0; usize::from(pad.unwrap_or(0))];
            let first = first.as_ref().map_or(&[][..], |it| it);
            frame(HEADERS, flags, &[&pads, first, &block, &end].concat())
        };
        let (sent, passed): (Vec<_>, Vec<_>) = fields.into_iter().unzip();
        (whole(sent.concat()), whole(passed.concat()))
    })
}

/// Generates frames that the decoder passes on unchanged: frames that are no HEADERS frames, header blocks without
/// END_HEADERS, and frames that are too long.
fn foreign() -> impl Strategy<Value = Vec<u8>> {
    let payload = || prop::collection::vec(any::<u8>(), 0..2000);
    let kind = prop_oneof![Just(0u8), 2..=255u8];
    let others =
        (kind, any::<u8>(), payload()).prop_map(|(kind, flags, it)| frame(kind, flags, &it));
    let parts =
        (any::<u8>(), payload()).prop_map(|(flags, it)| frame(HEADERS, flags & !END_HEADERS, &it));
    let long = authority().prop_map(|(field, _)| {
        let fields = field.repeat(LONGEST / field.len() + 1);
        frame(HEADERS, END_HEADERS, &fields)
    });
    prop_oneof![5 => others, 2 => parts, 1 => long]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn authorities_are_replaced_and_other_bytes_pass_however_the_input_is_cut(
        frames in prop::collection::vec(
            prop_oneof![headers(), foreign().prop_map(|it| (it.clone(), it))], 0..8),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..20),
        lost in 0..40usize,
    ) {
        let (sent, passed): (Vec<_>, Vec<_>) = frames.into_iter().unzip();
        let sent = stream(&sent);
        prop_assert_eq!(through(&[&sent]), stream(&passed));
        // Cuts off the last `lost` bytes, to test input whose last frame is incomplete.
        let sent = &sent[..sent.len() - lost.min(sent.len())];
        let mut cuts: Vec<usize> = cuts.iter().map(|it| it.index(sent.len() + 1)).collect();
        cuts.extend([0, sent.len()]);
        cuts.sort_unstable();
        let pieces: Vec<&[u8]> = cuts.windows(2).map(|it| &sent[it[0]..it[1]]).collect();
        prop_assert_eq!(through(&pieces), through(&[sent]));
    }

    #[test]
    fn any_bytes_pass_and_less_than_one_frame_is_buffered(
        bytes in prop::collection::vec(any::<u8>(), 0..40_000),
    ) {
        let mut decoder = AuthorityDecoder::new();
        let mut buffer = BytesMut::new();
        for piece in bytes.chunks(1000) {
            buffer.extend_from_slice(piece);
            while decoder.decode(&mut buffer).unwrap().is_some() {}
            prop_assert!(buffer.len() < HEAD + LONGEST);
        }
    }

    #[test]
    fn requests_are_read_as_they_were_sent_except_for_the_authority(
        requests in prop::collection::vec(
            ("[a-z]{1,60}(\\.[a-z]{1,60}){0,4}",
             prop::collection::vec((0..6usize, "[ -~]{0,400}"), 0..4)),
            1..40),
    ) {
        let requests: Vec<Request<()>> = requests.iter().map(|(name, fields)| {
            let mut request = Request::post(format!("http://{name}/x"));
            for (n, value) in fields {
                request = request.header(format!("x-{n}"), value.trim());
            }
            request.body(()).unwrap()
        }).collect();
        let expected: Vec<HeaderMap> = requests.iter().map(|it| it.headers().clone()).collect();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let read = runtime.block_on(served(usize::MAX, async |stream| {
            let (mut client, connection) = h2::client::handshake(stream).await.unwrap();
            tokio::spawn(connection);
            for request in requests.iter().cloned() {
                client = client.ready().await.unwrap();
                let (response, _) = client.send_request(request, true).unwrap();
                response.await.unwrap();
            }
        }));
        prop_assert!(read.iter().all(|it| it.uri().authority().unwrap() == "a"));
        let read: Vec<HeaderMap> = read.into_iter().map(|it| it.headers().clone()).collect();
        prop_assert_eq!(read, expected);
    }
}

/// Returns at most `most` requests that an h2 server gets from a client through a [`Connection`].
async fn served<T>(most: usize, client: impl AsyncFnOnce(UnixStream) -> T) -> Vec<Request<()>> {
    let folder = crate::files::temp_folder();
    let path = folder.join("x.sock");
    let socket = Socket::bind(&path, 1, IntGauge::new("g", "g").unwrap()).unwrap();
    let stream = UnixStream::connect(&path).await.unwrap();
    let connection = Connection::new(socket.accept().await, Duration::from_secs(5));
    let serve = async {
        let mut read = Vec::new();
        let mut server = h2::server::handshake(connection).await.unwrap();
        while read.len() < most
            && let Some(Ok((request, mut respond))) = server.accept().await
        {
            respond.send_response(Response::new(()), true).unwrap();
            read.push(request.map(drop));
        }
        read
    };
    let (read, _open) = tokio::join!(serve, client(stream));
    std::fs::remove_dir_all(folder).unwrap();
    read
}

#[tokio::test]
async fn a_request_with_a_path_as_authority_is_answered() {
    for literal in LITERALS {
        for name in names(literal) {
            // The header block has POST, http, /x and the authority. Two requests with this block are sent, so that the
            // dynamic table may have an entry when the second request is read.
            let named = [&name, text(0, PATH.as_bytes()).as_slice()].concat();
            let block = [&[0x83, 0x86, 0x04, 2, b'/', b'x'], named.as_slice()].concat();
            // The bytes of this SETTINGS frame are written out: it belongs to stream 0, and `frame` makes frames of
            // stream 1.
            let mut frames = vec![vec![0, 0, 0, 4, 0, 0, 0, 0, 0]];
            for id in [1, 3] {
                let mut request = frame(HEADERS, END_HEADERS | 1, &block);
                request[8] = id;
                frames.push(request);
            }
            let bytes = stream(&frames);
            let read = served(2, async |mut stream| {
                stream.write_all(&bytes).await.unwrap();
                stream
            });
            let read = read.await;
            assert_eq!(read.len(), 2, "{name:x?}");
            assert!(read.iter().all(|it| it.uri() == "http://a/x"), "{read:?}");
        }
    }
}
