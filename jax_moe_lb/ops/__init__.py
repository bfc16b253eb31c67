"""Operations with more than one implementation."""
