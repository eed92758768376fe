//! Reads the DNS settings of the result from the file that `resolvConf` names, such as `/etc/resolv.conf`.

use std::fs::File;
use std::io::Read as _;

use cadastre_core::node_allocation::Dns;

/// Maximum number of bytes that are read from a file.
const MAX_FILE: u64 = 1024 * 1024;

/// Reads the DNS settings from the file at a path. Ignores the part of the file after the first [`MAX_FILE`] bytes.
pub(super) fn read(path: &str) -> Result<Dns, String> {
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|file| file.take(MAX_FILE).read_to_end(&mut bytes));
    read.map_err(|error| {
        format!("cannot read {path}: {error}; correct ipam.resolvConf, or leave it out")
    })?;
    Ok(parse(&String::from_utf8_lossy(&bytes)))
}

fn parse(text: &str) -> Dns {
    let mut dns = Dns::default();
    for line in text.lines() {
        let mut words = line.split_whitespace().map(str::to_owned);
        let (Some(key), Some(first)) = (words.next(), words.next()) else {
            continue;
        };
        // Comments need no special case, because the first word of a comment is never one of the keys below.
        match key.as_str() {
            "nameserver" => dns.nameservers.push(first),
            "domain" => dns.domain = first,
            "search" => dns.search.extend([first].into_iter().chain(words)),
            "options" => dns.options.extend([first].into_iter().chain(words)),
            _ => {}
        }
    }
    dns
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_concatenated_and_the_last_domain_counts() {
        let text = "# search x\n;nameserver 1\n nameserver 10.0.0.1 more\r\nnameserver\ndomain a\n\
            search b c\ndomain d\noptions e\nsearch f\nother g\nnameserver fd00::1";
        assert_eq!(
            parse(text),
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
        for path in ["/nowhere/resolv.conf", "/"] {
            let error = read(path).unwrap_err();
            assert!(
                error.starts_with(&format!("cannot read {path}: ")),
                "{error}"
            );
        }
    }
}
