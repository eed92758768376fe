//! `resolvConf`: the DNS of the result, from a file such as `/etc/resolv.conf`.

use std::fs::File;
use std::io::Read as _;

use crate::cni::golang;
use cadastre_core::holding::Dns;

/// The longest line, in bytes; more is an error, as it is to host-local.
const MAX_LINE: usize = 65_535;

/// The most that is read of a file, in bytes.
const MAX_FILE: u64 = 1024 * 1024;

/// Reads a file; the error is host-local's text.
pub(super) fn read(path: &str) -> Result<Dns, String> {
    let fault = |what: &str, error| format!("{what} {path}: {}", golang::errno(&error));
    let file = File::open(path).map_err(|error| fault("open", error))?;
    let mut bytes = Vec::new();
    let read = file.take(MAX_FILE).read_to_end(&mut bytes);
    read.map_err(|error| fault("read", error))?;
    parse(&bytes)
}

fn parse(bytes: &[u8]) -> Result<Dns, String> {
    let mut dns = Dns::default();
    for line in bytes.split(|&byte| byte == b'\n') {
        if line.len() > MAX_LINE {
            return Err("bufio.Scanner: token too long".to_owned());
        }
        let line = golang::text(line);
        let line = line.trim();
        let mut words = line.split_whitespace().map(str::to_owned);
        let (Some(key), Some(first)) = (words.next(), words.next()) else {
            continue;
        };
        // A comment's first word is no key.
        match key.as_str() {
            "nameserver" => dns.nameservers.push(first),
            "domain" => dns.domain = first,
            "search" => dns.search.extend([first].into_iter().chain(words)),
            "options" => dns.options.extend([first].into_iter().chain(words)),
            _ => {}
        }
    }
    Ok(dns)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_add_up_and_the_last_domain_counts() {
        let text =
            b"# search x\n;nameserver 1\n nameserver 10.0.0.1 more\r\nnameserver\ndomain a\n\
            search b c\ndomain d\noptions e\nsearch f\nother g\nnameserver fd00::1";
        assert_eq!(
            parse(text).unwrap(),
            Dns {
                nameservers: vec!["10.0.0.1".to_owned(), "fd00::1".to_owned()],
                domain: "d".to_owned(),
                search: ["b", "c", "f"].map(str::to_owned).to_vec(),
                options: vec!["e".to_owned()],
            }
        );
    }

    #[test]
    fn a_file_that_cannot_be_read_is_an_error() {
        assert_eq!(
            read("/nowhere/resolv.conf").unwrap_err(),
            "open /nowhere/resolv.conf: no such file or directory"
        );
        assert_eq!(read("/").unwrap_err(), "read /: is a directory");
        let line = vec![b'a'; MAX_LINE + 1];
        assert_eq!(parse(&line).unwrap_err(), "bufio.Scanner: token too long");
    }
}
