//! The exchange by which ranks that `torchrun` started find each other.
//!
//! `torchrun` starts processes and connects nothing. It tells each of them an address (`MASTER_ADDR`,
//! `MASTER_PORT`); rank 0 listens there, and every other rank connects to it. On these connections the ranks
//! *exchange* a few bytes: each rank gives some to rank 0, and rank 0 gives those of all ranks to all. NCCL's
//! id takes this way, and the facts that ranks compare; data do not.
//!
//! ```text
//!   rank 1 ── hello: 1 of 3 ──►        ◄── hello: 2 of 3 ── rank 2
//!          ◄── welcome ──────── rank 0 ──── welcome ─────►
//!          ── here ───────────►        ◄─────────── here ──
//!          ── its bytes ──────►        ◄────── its bytes ──
//!          ◄── bytes of 0, 1, 2 ───────── bytes of 0, 1, 2 ──►
//! ```
//!
//! A rank that hears no welcome in time connects anew. Rank 0 counts a rank from its *here* on.
//!
//! A frame is its length, four bytes, and so many bytes; no frame is longer than [`LONGEST`], and none is
//! allocated before its length was looked at. Every read has a deadline. Rank 0 says which ranks are missing.
//!
//! `torchrun` often listens at `MASTER_PORT` itself (`TORCHELASTIC_USE_AGENT_STORE`). Rank 0 therefore takes
//! the first free one of [`PORTS`] ports from there on, and the others ask one after the other for a listener
//! that belongs to their job.

use std::hash::{BuildHasher, RandomState};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::environment::Place;
use crate::error::Error;

/// Most bytes that a rank gives to an exchange.
pub(crate) const MOST: usize = 64 << 10;

/// Ports that rank 0 may listen at, from `MASTER_PORT` on.
const PORTS: u16 = 16;

/// What a hello begins with; the last digit changes with the protocol.
const MAGIC: [u8; 8] = *b"kilnran2";

/// What a rank answers to a welcome.
const HERE: &[u8] = b"here";

/// Bytes of a hello.
const HELLO: usize = 28;

/// How long a stranger that connects to rank 0 may take to say hello.
const MANNERS: Duration = Duration::from_secs(2);

/// How long other ranks wait for what rank 0 says after it has given up: its answer names who is missing.
const ANSWER: Duration = Duration::from_secs(5);

/// Where the ranks meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Meeting {
    host: String,
    port: u16,
    /// Whether somebody else listens at `port`.
    is_taken: bool,
}

impl Meeting {
    /// What the environment says.
    ///
    /// # Errors
    /// [`Error::Environment`] if it names no address.
    pub(crate) fn read(variable: impl Fn(&str) -> Option<String>) -> Result<Self, Error> {
        let wrong = |name: &'static str, expected| Error::Environment {
            name,
            value: variable(name).unwrap_or_default(),
            expected,
        };
        let host = variable("MASTER_ADDR").filter(|host| !host.is_empty());
        let host = host.ok_or_else(|| wrong("MASTER_ADDR", "address of rank 0"))?;
        let port = variable("MASTER_PORT").and_then(|port| port.trim().parse().ok());
        let port = port.filter(|&port: &u16| port > 0 && port < u16::MAX - PORTS);
        Ok(Self {
            host,
            port: port.ok_or_else(|| wrong("MASTER_PORT", "port"))?,
            is_taken: variable("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|it| it == "True"),
        })
    }

    fn name(&self) -> String {
        format!("the meeting at {}:{}", self.host, self.port)
    }

    /// The addresses at which rank 0 may listen.
    fn addresses(&self) -> Result<Vec<SocketAddr>, Error> {
        let first = self.port + u16::from(self.is_taken);
        let unknown = |error: io::Error| Error::Meeting {
            what: self.name(),
            reason: error.to_string(),
        };
        let mut all = Vec::new();
        for port in first..self.port + PORTS {
            all.extend((self.host.as_str(), port).to_socket_addrs().map_err(unknown)?);
        }
        Ok(all)
    }
}

/// The connections: of rank 0 one to each other rank, of any other rank one to rank 0.
#[derive(Debug)]
pub(crate) struct Star {
    rank: usize,
    size: usize,
    /// By rank at rank 0, where the own one is missing; rank 0's alone elsewhere.
    links: Vec<Option<TcpStream>>,
}

/// A random number of this process. A rank says hello again if it has not heard the answer, and the number
/// tells that from two processes that were given the same rank.
fn nonce() -> u64 {
    static NONCE: OnceLock<u64> = OnceLock::new();
    // The keys of a hasher are random.
    *NONCE.get_or_init(|| RandomState::new().hash_one(std::process::id()))
}

/// A hello: magic, the port that names the job, the number of ranks, the rank, the process's [`nonce`].
fn hello(meeting: &Meeting, place: &Place, nonce: u64) -> [u8; HELLO] {
    let mut bytes = [0; HELLO];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..12].copy_from_slice(&u32::from(meeting.port).to_le_bytes());
    bytes[12..16].copy_from_slice(&(place.size as u32).to_le_bytes());
    bytes[16..20].copy_from_slice(&(place.rank as u32).to_le_bytes());
    bytes[20..].copy_from_slice(&nonce.to_le_bytes());
    bytes
}

/// Number `index` of four bytes each behind the magic.
fn word(hello: &[u8; HELLO], index: usize) -> usize {
    let bytes: [u8; 4] = std::array::from_fn(|i| hello[8 + 4 * index + i]);
    u32::from_le_bytes(bytes) as usize
}

/// Sends a frame.
fn send(mut stream: &TcpStream, bytes: &[u8], deadline: Instant) -> io::Result<()> {
    stream.set_write_timeout(Some(left(deadline)))?;
    let length = u32::try_from(bytes.len()).map_err(|_| io::Error::other("a frame is too long"))?;
    stream.write_all(&length.to_le_bytes())?;
    stream.write_all(bytes)
}

/// Receives a frame of at most `most` bytes.
fn receive(stream: &TcpStream, most: usize, deadline: Instant) -> io::Result<Vec<u8>> {
    let mut length = [0; 4];
    fill(stream, &mut length, deadline)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > most {
        let reason = format!("a frame of {length} bytes came, and {most} are the most");
        return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
    }
    let mut bytes = vec![0; length];
    fill(stream, &mut bytes, deadline)?;
    Ok(bytes)
}

fn fill(mut stream: &TcpStream, bytes: &mut [u8], deadline: Instant) -> io::Result<()> {
    let mut at = 0;
    while at < bytes.len() {
        stream.set_read_timeout(Some(left(deadline)))?;
        match stream.read(&mut bytes[at..]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => at += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if is_late(&error) && Instant::now() < deadline => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The time that is left; never none, which would mean for ever. After the deadline a look at what has arrived.
fn left(deadline: Instant) -> Duration {
    deadline
        .saturating_duration_since(Instant::now())
        .max(Duration::from_millis(1))
}

fn is_late(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

impl Star {
    /// Connects the ranks; each waits for the others for at most `timeout`.
    ///
    /// # Errors
    /// [`Error::Timeout`] naming who did not come, [`Error::Worlds`] if two ranks disagree about their number or
    /// are the same one, [`Error::Meeting`] if rank 0 cannot listen.
    pub(crate) fn connect(meeting: &Meeting, place: &Place, timeout: Duration) -> Result<Self, Error> {
        let deadline = Instant::now() + timeout;
        match place.rank {
            0 => Self::listen(meeting, place, deadline, timeout),
            _ => Self::join(meeting, place, deadline, timeout),
        }
    }

    fn listen(meeting: &Meeting, place: &Place, deadline: Instant, timeout: Duration) -> Result<Self, Error> {
        let failed = |error: io::Error| Error::Meeting {
            what: meeting.name(),
            reason: error.to_string(),
        };
        let mut refused = io::Error::other("it has no address");
        let mut bound = None;
        for address in meeting.addresses()? {
            match TcpListener::bind(address) {
                Ok(listener) => {
                    bound = Some(listener);
                    break;
                }
                Err(error) => refused = error,
            }
        }
        let listener = bound.ok_or_else(|| failed(refused))?;
        listener.set_nonblocking(true).map_err(failed)?;
        let mut links: Vec<Option<TcpStream>> = (0..place.size).map(|_| None).collect();
        let mut nonces: Vec<Option<u64>> = vec![None; place.size];
        while links.iter().skip(1).any(Option::is_none) {
            match listener.accept() {
                Ok((stream, _)) => {
                    if let Some((rank, nonce, stream)) = Self::welcome(meeting, place, &nonces, stream)? {
                        nonces[rank] = Some(nonce);
                        links[rank] = Some(stream);
                    }
                }
                Err(error) if is_late(&error) => std::thread::sleep(Duration::from_millis(2)),
                // A connection that ended before it was accepted.
                Err(error) => tracing::debug!(target: "kiln", "nobody came to {}: {error}", meeting.name()),
            }
            if Instant::now() >= deadline {
                let missing = (1..place.size).filter(|&rank| links[rank].is_none());
                return Err(Error::Timeout {
                    rank: 0,
                    missing: missing.collect(),
                    waited: timeout,
                    what: meeting.name(),
                });
            }
        }
        Ok(Self {
            rank: 0,
            size: place.size,
            links,
        })
    }

    /// Looks at who has connected: its rank, its nonce and the connection, which replaces an earlier one of
    /// the same process. None for a stranger, and for a rank that did not take the answer: it will come
    /// again.
    fn welcome(
        meeting: &Meeting,
        place: &Place,
        nonces: &[Option<u64>],
        stream: TcpStream,
    ) -> Result<Option<(usize, u64, TcpStream)>, Error> {
        let polite = Instant::now() + MANNERS;
        let heard = stream
            .set_nonblocking(false)
            .and_then(|()| stream.set_nodelay(true))
            .and_then(|()| receive(&stream, HELLO, polite));
        let Some(heard) = heard.ok().and_then(|bytes| <[u8; HELLO]>::try_from(bytes).ok()) else {
            return Ok(None);
        };
        let (port, size, rank) = (word(&heard, 0), word(&heard, 1), word(&heard, 2));
        let nonce = u64::from_le_bytes(std::array::from_fn(|i| heard[20 + i]));
        if heard[..8] != MAGIC || port != usize::from(meeting.port) {
            // Of another job: it goes on looking for its own.
            let _ = send(&stream, b"other job", polite);
            return Ok(None);
        }
        let reason = if size != place.size {
            format!(
                "rank {rank} was started as one of {size} ranks, and rank 0 as one of {}",
                place.size
            )
        } else if rank == 0 || rank >= size {
            format!("rank {rank} of {size} cannot join rank 0")
        } else if nonces[rank].is_some_and(|known| known != nonce) {
            format!("there are two ranks {rank}")
        } else {
            // It may have waited too long and be gone: what it said is read all the same.
            let polite = Instant::now() + MANNERS;
            let met = send(&stream, b"welcome", polite).and_then(|()| receive(&stream, HERE.len(), polite));
            return Ok(met
                .is_ok_and(|said| said == HERE)
                .then_some((rank, nonce, stream)));
        };
        let _ = send(&stream, format!("no: {reason}").as_bytes(), polite);
        Err(Error::Worlds {
            what: meeting.name(),
            reason,
        })
    }

    fn join(meeting: &Meeting, place: &Place, deadline: Instant, timeout: Duration) -> Result<Self, Error> {
        let own = hello(meeting, place, nonce());
        let addresses = meeting.addresses()?;
        while Instant::now() < deadline {
            for address in &addresses {
                let Ok(stream) = TcpStream::connect_timeout(address, left(deadline).min(MANNERS)) else {
                    continue;
                };
                let polite = Instant::now() + MANNERS;
                let answer = stream
                    .set_nodelay(true)
                    .and_then(|()| send(&stream, &own, polite))
                    .and_then(|()| receive(&stream, 1 << 10, polite));
                match answer.as_deref() {
                    Ok(b"welcome") => {
                        if send(&stream, HERE, polite).is_ok() {
                            return Ok(Self {
                                rank: place.rank,
                                size: place.size,
                                links: vec![Some(stream)],
                            });
                        }
                    }
                    Ok(answer) => {
                        if let Some(reason) = answer.strip_prefix(b"no: ") {
                            return Err(Error::Worlds {
                                what: meeting.name(),
                                reason: String::from_utf8_lossy(reason).into_owned(),
                            });
                        }
                    }
                    Err(_) => {}
                }
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Err(Error::Timeout {
            rank: place.rank,
            missing: vec![0],
            waited: timeout,
            what: meeting.name(),
        })
    }

    /// Gives `bytes`, at most [`MOST`], to all ranks, and returns what each gave. `what` says what for. After an
    /// error nothing connects the ranks any more.
    ///
    /// # Errors
    /// [`Error::Timeout`] and [`Error::Gone`], naming the ranks.
    pub(crate) fn exchange(
        &mut self,
        bytes: &[u8],
        timeout: Duration,
        what: &str,
    ) -> Result<Vec<Vec<u8>>, Error> {
        if bytes.len() > MOST {
            return Err(Error::Operands(format!(
                "{what}: {} bytes are more than the {MOST} that ranks exchange",
                bytes.len()
            )));
        }
        match self.rank {
            0 => self.gather(bytes, timeout, what),
            _ => self.give(bytes, timeout, what),
        }
    }

    /// Rank 0's part.
    fn gather(&mut self, bytes: &[u8], timeout: Duration, what: &str) -> Result<Vec<Vec<u8>>, Error> {
        let deadline = Instant::now() + timeout;
        let mut given = vec![bytes.to_vec()];
        let (mut late, mut gone) = (Vec::new(), Vec::new());
        for (rank, link) in self.links.iter().enumerate().skip(1) {
            let heard = match link {
                Some(stream) => receive(stream, MOST, deadline),
                None => Err(io::ErrorKind::NotConnected.into()),
            };
            given.push(match heard {
                Ok(bytes) => bytes,
                Err(error) => {
                    match is_late(&error) {
                        true => late.push(rank),
                        false => gone.push(rank),
                    }
                    Vec::new()
                }
            });
            if !gone.is_empty() {
                break;
            }
        }
        // The answer: a byte that says whether all came, then what they gave or who is missing.
        let is_gone = !gone.is_empty();
        let missing = if is_gone { gone } else { late };
        let mut answer = vec![match (missing.is_empty(), is_gone) {
            (true, _) => 0,
            (false, false) => 1,
            (false, true) => 2,
        }];
        match missing.is_empty() {
            true => given.iter().for_each(|bytes| {
                answer.extend((bytes.len() as u32).to_le_bytes());
                answer.extend(bytes);
            }),
            false => missing
                .iter()
                .for_each(|&rank| answer.extend((rank as u32).to_le_bytes())),
        }
        let told = Instant::now() + ANSWER;
        for (rank, link) in self.links.iter().enumerate().skip(1) {
            let sent = link.as_ref().map(|stream| send(stream, &answer, told));
            if !matches!(sent, Some(Ok(()))) && missing.is_empty() {
                return Err(self.missing(vec![rank], true, timeout, what));
            }
        }
        match missing.is_empty() {
            true => Ok(given),
            false => Err(self.missing(missing, is_gone, timeout, what)),
        }
    }

    /// Another rank's part.
    fn give(&mut self, bytes: &[u8], timeout: Duration, what: &str) -> Result<Vec<Vec<u8>>, Error> {
        let deadline = Instant::now() + timeout + ANSWER;
        let most = 1 + self.size * (MOST + 4);
        let answer = match &self.links[0] {
            Some(stream) => send(stream, bytes, deadline).and_then(|()| receive(stream, most, deadline)),
            None => Err(io::ErrorKind::NotConnected.into()),
        };
        let answer = match answer {
            Ok(answer) => answer,
            Err(error) => return Err(self.missing(vec![0], !is_late(&error), timeout, what)),
        };
        let nonsense = || Error::Meeting {
            what: what.to_owned(),
            reason: "rank 0 gave an answer that is none".into(),
        };
        let (&state, mut rest) = answer.split_first().ok_or_else(nonsense)?;
        let mut words = Vec::new();
        if state != 0 {
            while let Some((word, after)) = rest.split_first_chunk::<4>() {
                words.push(u32::from_le_bytes(*word) as usize);
                rest = after;
            }
            return Err(self.missing(words, state == 2, timeout, what));
        }
        let mut given = Vec::with_capacity(self.size);
        for _ in 0..self.size {
            let (length, after) = rest.split_first_chunk::<4>().ok_or_else(nonsense)?;
            let length = u32::from_le_bytes(*length) as usize;
            let (own, after) = after.split_at_checked(length).ok_or_else(nonsense)?;
            given.push(own.to_vec());
            rest = after;
        }
        Ok(given)
    }

    fn missing(&mut self, missing: Vec<usize>, gone: bool, waited: Duration, what: &str) -> Error {
        let (rank, what) = (self.rank, what.to_owned());
        self.links.iter_mut().for_each(|link| *link = None);
        match gone {
            true => Error::Gone { rank, missing, what },
            false => Error::Timeout {
                rank,
                missing,
                waited,
                what,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    fn place(rank: usize, size: usize) -> Place {
        Place {
            rank,
            size,
            ..Place::ALONE
        }
    }

    fn meeting() -> Meeting {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let port = listener.local_addr().expect("an address").port();
        Meeting {
            host: "127.0.0.1".into(),
            port: port.min(60_000),
            is_taken: false,
        }
    }

    /// Connects to rank 0 and says hello.
    fn visit(meeting: &Meeting, rank: usize, size: usize, nonce: u64) -> TcpStream {
        let begun = Instant::now();
        loop {
            match TcpStream::connect((meeting.host.as_str(), meeting.port)) {
                Ok(stream) => {
                    let hello = hello(meeting, &place(rank, size), nonce);
                    send(&stream, &hello, begun + LONG).expect("rank 0 listens");
                    return stream;
                }
                Err(error) => assert!(begun.elapsed() < LONG, "{error}"),
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn a_rank_that_did_not_hear_its_welcome_comes_again() {
        let meeting = meeting();
        std::thread::scope(|scope| {
            let first =
                scope.spawn(|| Star::connect(&meeting, &place(0, 2), LONG)?.exchange(b"a", LONG, "it"));
            // It gave up before it was heard.
            drop(visit(&meeting, 1, 2, nonce()));
            let mut star = Star::connect(&meeting, &place(1, 2), LONG).expect("rank 0 waits for it");
            let expected = Ok(vec![b"a".to_vec(), b"b".to_vec()]);
            assert_eq!(star.exchange(b"b", LONG, "it"), expected);
            assert_eq!(first.join().expect("no panic"), expected);
        });
    }

    #[test]
    fn a_process_may_say_hello_twice_and_two_processes_may_not() {
        let meeting = meeting();
        let deadline = Instant::now() + LONG;
        std::thread::scope(|scope| {
            let first = scope.spawn(|| Star::connect(&meeting, &place(0, 3), LONG).map(|_| ()));
            for _ in 0..2 {
                let stream = visit(&meeting, 1, 3, 5);
                assert_eq!(receive(&stream, 100, deadline).expect("an answer"), b"welcome");
                send(&stream, HERE, deadline).expect("rank 0 listens");
            }
            let stream = visit(&meeting, 1, 3, 6);
            let answer = receive(&stream, 100, deadline).expect("an answer");
            assert_eq!(String::from_utf8_lossy(&answer), "no: there are two ranks 1");
            let error = first.join().expect("no panic").expect_err("there are two");
            assert!(matches!(error, Error::Worlds { .. }), "{error}");
        });
    }
}
