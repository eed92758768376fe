//! A pair of values, one for each address family.

use super::cidr::Family;

/// One value for IPv4 and one for IPv6.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Dual<T> {
    /// The value that [`Dual::get`] returns for [`Family::V4`].
    pub v4: T,
    /// The value that [`Dual::get`] returns for [`Family::V6`].
    pub v6: T,
}

impl<T> Dual<T> {
    /// Calls `make` for each family, IPv4 first.
    pub fn from_fn(mut make: impl FnMut(Family) -> T) -> Self {
        Self {
            v4: make(Family::V4),
            v6: make(Family::V6),
        }
    }

    /// Returns the value for `family`, for code that handles both families in the same way.
    pub fn get(&self, family: Family) -> &T {
        match family {
            Family::V4 => &self.v4,
            Family::V6 => &self.v6,
        }
    }

    /// Returns a mutable reference to the value for `family`.
    pub fn get_mut(&mut self, family: Family) -> &mut T {
        match family {
            Family::V4 => &mut self.v4,
            Family::V6 => &mut self.v6,
        }
    }

    /// Iterates over both values with their families, IPv4 first.
    pub fn iter(&self) -> std::array::IntoIter<(Family, &T), 2> {
        [(Family::V4, &self.v4), (Family::V6, &self.v6)].into_iter()
    }

    /// Converts both values with the same function. IPv4 is converted first.
    pub fn map<U>(self, mut convert: impl FnMut(T) -> U) -> Dual<U> {
        Dual {
            v4: convert(self.v4),
            v6: convert(self.v6),
        }
    }

    /// Borrows both values, for example to `map` without consuming them.
    pub fn as_ref(&self) -> Dual<&T> {
        Dual {
            v4: &self.v4,
            v6: &self.v6,
        }
    }
}

impl<'a, T> IntoIterator for &'a Dual<T> {
    type Item = (Family, &'a T);
    type IntoIter = std::array::IntoIter<(Family, &'a T), 2>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_family_has_its_own_value() {
        let mut dual = Dual::from_fn(Family::bits);
        *dual.get_mut(Family::V6) += 1;
        assert_eq!((*dual.get(Family::V4), *dual.get(Family::V6)), (32, 129));
        let dual = dual.map(u32::from);
        let both = [(Family::V4, &32), (Family::V6, &129)];
        assert_eq!(dual.iter().collect::<Vec<_>>(), both);
        assert_eq!((&dual).into_iter().collect::<Vec<_>>(), both);
    }
}
